"""The service: one place for a fleet that shows whether the cache pays, and an API for programs.

Its state is only in the database and in the store, so that any number of replicas can run. `serving` starts it, `app`
puts it together from `operations` (the table of what can be asked for), `access` (who may), `limits` (how much),
`metrics` and `page`; `api/` has what the operations do; `backend` is what they work on: `reports` makes what nodes
report durable, `index` answers look-ups, `upkeep` reads the store into the catalogue meanwhile.
"""
