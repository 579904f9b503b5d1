"""Settings: which source wins, what /etc can lock, and what a wrong value says."""

from pathlib import Path

import pytest

from cachemgr.errors import UsageError
from cachemgr.settings import TABLE, Settings, Value, load


class Sources:
    """Settings files and variables of one imaginary user."""

    def __init__(self, directory: Path) -> None:
        self.etc = directory / "etc.toml"
        self.home = directory / "home"
        self.user = self.home / ".config" / "cachemgr" / "config.toml"
        self.user.parent.mkdir(parents=True)
        self.named = directory / "named.toml"

    def load(self, flags: dict[str, Value | None] | None = None, **environ: str) -> Settings:
        config = self.named if self.named.exists() else None
        return load({"HOME": str(self.home), **environ}, flags or {}, config=config, etc=self.etc)


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(tmp_path)


def test_defaults_lie_in_the_users_cache_directory(sources: Sources) -> None:
    settings = sources.load()
    assert settings.home == sources.home / ".cache" / "cachemgr"
    assert settings.store == settings.home / "store"
    assert set(settings.origins.values()) == {"default"}
    assert sources.load(XDG_CACHE_HOME="/x").home == Path("/x/cachemgr")


def test_each_source_overrides_the_one_before(sources: Sources) -> None:
    sources.etc.write_text('publish = "never"\ndeadline = 1\n')
    assert (sources.load().publish, sources.load().deadline) == ("never", 1.0)
    sources.user.write_text("deadline = 2\n")
    assert sources.load().deadline == 2.0
    sources.named.write_text("deadline = 3\n")
    assert sources.load().deadline == 3.0
    assert sources.load(CACHEMGR_DEADLINE="4").deadline == 4.0
    flagged = sources.load({"deadline": 5.0}, CACHEMGR_DEADLINE="4")
    assert flagged.deadline == 5.0
    assert flagged.origins["deadline"] == "flag"
    assert flagged.origins["publish"] == str(sources.etc)


def test_etc_can_lock_a_value_against_everybody(sources: Sources) -> None:
    sources.etc.write_text('publish = "never"\nlocked = ["publish"]\n')
    sources.user.write_text('publish = "local"\n')
    settings = sources.load(CACHEMGR_PUBLISH="local")
    assert settings.publish == "never"
    assert settings.origins["publish"] == f"{sources.etc} (locked)"
    with pytest.raises(UsageError, match="`publish` is locked by"):
        sources.load({"publish": "local"})


def test_a_value_can_be_locked_at_its_default(sources: Sources) -> None:
    sources.etc.write_text('locked = ["strict"]\n')
    assert sources.load(CACHEMGR_STRICT="1").strict is False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense = 1", "sets `nonsense`, which is no setting"),
        ("deadline = -1", "`deadline` from .* must be a number of seconds, 0 or more, not `-1`"),
        ("deadline = true", "`deadline` .* must be a number of seconds"),
        ('publish = "mirror-only"', "`publish` .* must be `never`, `local` or `mirror`"),
        ("strict = 3", "`strict` .* must be true or false"),
        ("store = 3", "`store` .* must be a text"),
        ("ignore_arg = [1]", "`ignore_arg` .* must be a list of texts"),
        ('budget = "20 loaves"', "`budget` .* must be a size such as 20GB or 20GiB, or 0 for none, not `20 loaves`"),
        ("budget = -1", "`budget` .* must be a size"),
        ("budget = true", "`budget` .* must be a size"),
        ('budget = "iB"', "`budget` .* must be a size"),
        ("= broken", "is no TOML"),
    ],
)
def test_a_wrong_value_names_itself_and_where_it_stands(sources: Sources, text: str, said: str) -> None:
    sources.user.write_text(text)
    with pytest.raises(UsageError, match=said):
        sources.load()


def test_a_wrong_variable_names_the_variable(sources: Sources) -> None:
    with pytest.raises(UsageError, match="`wait` from CACHEMGR_WAIT must be"):
        sources.load(CACHEMGR_WAIT="soon")


def test_a_named_settings_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no settings file"):
        load({"HOME": str(tmp_path)}, {}, config=tmp_path / "missing.toml", etc=tmp_path / "none")


@pytest.mark.parametrize("why", ["its name is too long", "it leads round and round"])
def test_a_home_that_cannot_be_there_has_no_settings(tmp_path: Path, why: str) -> None:
    home = tmp_path.joinpath(*["long" * 50] * 30) if why == "its name is too long" else tmp_path / "home"
    if why == "it leads round and round":
        home.symlink_to(home)
    assert load({"HOME": str(home)}, {}, etc=tmp_path / "none").publish == "local"


def test_the_working_directory_has_no_say(sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cachemgr.toml").write_text('publish = "never"\n')
    (tmp_path / "config.toml").write_text('publish = "never"\n')
    monkeypatch.chdir(tmp_path)
    assert sources.load().publish == "local"


def test_lists_are_written_with_commas_or_spaces_in_variables(sources: Sources) -> None:
    assert sources.load(CACHEMGR_IGNORE_ARG="--port,--host --x").ignore_arg == ("--port", "--host", "--x")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0", 0),
        ("123", 123),
        ("5kB", 5000),
        ("5 KB", 5000),
        ("20GB", 20 * 10**9),
        ("20 GiB", 20 * 2**30),
        ("1.5Gi", 3 * 2**29),
        ("8Gi", 8 * 2**30),
        ("1TB", 10**12),
        ("512M", 512 * 10**6),
    ],
)
def test_sizes_are_read_as_people_and_kubernetes_write_them(sources: Sources, text: str, wanted: int) -> None:
    assert sources.load(CACHEMGR_BUDGET=text).budget == wanted


def test_every_setting_has_a_help_and_a_variable() -> None:
    assert all(setting.help and setting.variable == f"CACHEMGR_{setting.name.upper()}" for setting in TABLE)
    fields = {name for name in Settings.__dataclass_fields__ if name != "origins"}
    assert {setting.name for setting in TABLE} == fields
