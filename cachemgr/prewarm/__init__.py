"""The prewarm journey: start a command until a start adds nothing, so that the next one anywhere is warm.

`starting` says what is started, `exercise` asks a server what users will ask, `passes` starts one entry until it is
warm, `entries` does that for a whole spec, each below a root of its own (`roots`); `kubernetes` and `on_ray` have a
cluster do it. `seed` makes what an image carries, also of what `gathering` finds in stores for other machines, and
`proof` shows that it is enough, with starts that `isolation` watches.
"""
