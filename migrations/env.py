"""How alembic runs these migrations: on the connection of whoever asks, in the transaction that is open there."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"], transactional_ddl=True, version_table="cachemgr_version"
)
with context.begin_transaction():
    context.run_migrations()
