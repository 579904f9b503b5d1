"""The prewarm journey: start a command until a start adds nothing, so that the next one anywhere is warm.

`starting` says what is started, `exercise` asks a server what users will ask, `passes` starts one entry until it is
warm, `entries` does that for a whole spec. `seed` makes what an image carries, `proof` shows that it is enough.
"""
