"""The catalogue: an SQL index of what stores hold and of how launches went. The store is the truth.

Losing it costs nothing but the time to read the records again: `refresh` brings it up to date with one store and
`open_catalogue` makes it where it is missing, so that both are all that `reindex` needs. No launch ever opens it.

`schema` has the tables, `opened` opens them wherever they are, `migrate` brings old ones up to date (the only use of
alembic), `ingest` reads a store, which `sources` names, `past` adds old launches up, `artifacts`, `launches`,
`statistics` and `measures` ask. For the service the database has `tokens` and what its replicas share (`service`).
"""
