"""`cachemgr config show`: every setting with its value and where it comes from."""

import click

from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.session import settings_of
from cachemgr.sensitive import HIDDEN
from cachemgr.settings import TABLE, Setting, Settings, Value


@click.group(epilog=EXIT_CODES)
def config() -> None:
    """Show settings and where each comes from."""


@config.command(epilog=EXIT_CODES)
@output.listing
@click.pass_context
def show(ctx: click.Context, form: str, as_json: bool, quiet: bool) -> None:
    """Show every setting, its value, its variable and its origin."""
    settings = settings_of(ctx)
    chosen = output.chosen(form, as_json=as_json, quiet=quiet)
    if chosen == "json":
        output.document(
            settings={
                setting.name: {
                    "value": _shown(settings, setting),
                    "variable": setting.variable,
                    "origin": settings.origins[setting.name],
                    "help": setting.help,
                }
                for setting in TABLE
            }
        )
    elif chosen == "quiet":
        output.lines([setting.name for setting in TABLE])
    else:
        rows = [
            (setting.name, _text(_shown(settings, setting)), setting.variable, settings.origins[setting.name])
            for setting in TABLE
        ]
        output.table(("SETTING", "VALUE", "VARIABLE", "ORIGIN"), rows, flexible="VALUE")


def _shown(settings: Settings, setting: Setting) -> Value | None:
    value = settings.value(setting.name)
    return HIDDEN if setting.secret and value is not None else value


def _text(value: Value | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return output.size(value) if value else "none"
    if isinstance(value, float):
        return f"{value:g}"
    return " ".join(value) or "-" if isinstance(value, tuple) else value
