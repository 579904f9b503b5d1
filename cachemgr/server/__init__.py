"""The service: one place for a fleet that shows whether the cache pays, and an API for programs.

Its state is only in the database and in the store, so that any number of replicas can run. `serving` starts it, `app`
puts it together from `operations` (the table of what can be asked for), `access` (who may), `limits` (how much),
`metrics` and `pages`; `wire` has HTTP as it comes in; `api/` has what the operations do, in the terms of `contract`,
of which `openapi` makes a document and `problems` the failures; `audit` says who changed what. `backend` is what they
work on: `reports` makes what nodes report durable, `index` answers look-ups, `upkeep` reads the store into the
catalogue meanwhile.
"""
