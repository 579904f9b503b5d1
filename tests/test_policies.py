"""vLLM under each policy, end to end by wrapper and by plugin: what a start uses of a seed, a shared store and its own,
and what it says about the rest. The engines are the stand-ins of `tests/engines.py` and `tests/plugged.py`;
`test_vllm_e2e.py` has a real one.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cachemgr.errors import CacheError
from cachemgr.store import layout
from cachemgr.store.captures import keys, listing
from cachemgr.store.local import LocalStore
from tests import plugged
from tests.authorities import Authority
from tests.engines import Engines
from tests.machines import Machine
from tests.plugged import Plugged

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def author() -> Authority:
    return Authority()


class Site:
    """A builder that fills a seed, and pods with stores of their own behind which it lies."""

    def __init__(self, directory: Path) -> None:
        self.engines = Engines.install(directory)
        self.seed = LocalStore(directory / "store")
        self.cold = self.engines.machine("builder").run(*self.engines.serve())

    def pod(self, name: str, **variables: str) -> Machine:
        own = {"CACHEMGR_SEED": str(self.seed), **variables}
        return Machine(
            self.engines.directory / name, self.engines.directory / f"{name}-store", {**self.engines.variables, **own}
        )

    def start(self, name: str, **variables: str) -> dict[str, Any]:
        """A first start of a pod."""
        return self.pod(name, **variables).run(*self.engines.serve())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def told(report: dict[str, Any]) -> tuple[str, str, str | None]:
    return report["result"], report["verdict"], report["where"]


def test_a_seed_is_used_as_its_policy_says(site: Site, author: Authority) -> None:
    keyless = site.start("keyless")
    assert told(keyless) == ("none", "cold", None)
    assert f"seed {site.seed} ignored: no trusted key; set CACHEMGR_TRUSTED_KEYS" in keyless["stderr"]
    assert keyless["errors"] == {"levels ignored": 1}
    unsigned = site.start("unsigned", CACHEMGR_TRUSTED_KEYS=author.public)
    assert told(unsigned) == ("none", "cold", None)
    assert "starts cold · untrusted: capture " in unsigned["stderr"]
    assert "nobody has signed it" in unsigned["stderr"]
    assert unsigned["errors"] == {"untrusted": 1}
    assert any(reason.startswith("untrusted capture: ") for reason in unsigned["reasons"])
    warned = site.start("warned", CACHEMGR_TRUST="warn")
    assert told(warned) == ("exact", "used", "seed")
    assert "used although capture " in warned["stderr"]
    assert warned["errors"] == {"used untrusted": 1}
    off = site.start("off", CACHEMGR_TRUST="local=require,seed=off")
    assert told(off) == ("exact", "used", "seed")
    assert off["errors"] == {}
    author.sign_all(site.seed, time.time())
    signed = site.start("signed", CACHEMGR_TRUSTED_KEYS=author.public)
    assert told(signed) == ("exact", "used", "seed")
    assert (signed["errors"], sum(signed["added"].values())) == ({}, 0)


def test_a_signed_seed_whose_bytes_were_changed_starts_cold(site: Site, author: Authority) -> None:
    author.sign_all(site.seed, time.time())
    (layer,) = [Path(str(site.seed), entry.name) for entry in site.seed.scan("layers/")]
    data = layer.read_bytes()
    layer.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    pod = site.pod("pod", CACHEMGR_TRUSTED_KEYS=author.public)
    hurt = pod.run(*site.engines.serve())
    assert hurt["verdict"] == "cold"
    assert "has other bytes than its name says" in hurt["stderr"]
    again = pod.run(*site.engines.serve())
    assert told(again) == ("exact", "used", "local")


def test_a_manifest_of_somebody_else_under_a_good_signature_starts_cold(site: Site, author: Authority) -> None:
    author.sign_all(site.seed, time.time())
    ((name, (key, _beside)),) = listing(site.seed).items()
    capture = layout.capture_of(name)
    assert capture is not None
    other = site.engines.machine("builder").run(*site.engines.serve("--max-model-len=16"))["published"]
    (elsewhere,) = [each for each in keys(site.seed) if each != key]
    forged = site.seed.read(layout.manifest_name(elsewhere, other), limit=1 << 20)
    site.seed.delete(name)
    site.seed.put(name, forged)
    cold = site.start("pod", CACHEMGR_TRUSTED_KEYS=author.public)
    assert cold["result"] == "none"
    assert any("has other bytes than its name says" in reason for reason in cold["reasons"])


def test_what_this_machine_made_is_used_under_every_policy_and_what_others_made_is_not(
    site: Site, author: Authority
) -> None:
    """A shared store with `CACHEMGR_TRUST=require`, and nobody who signs."""
    shared = {"CACHEMGR_TRUST": "require", "CACHEMGR_SEED": ""}
    one, two = (site.engines.machine(name, **shared) for name in ("one", "two"))
    cold = one.run(*site.engines.serve())
    assert (cold["result"], cold["errors"]) == ("none", {"untrusted": 1})
    assert cold["published"] is not None
    again = one.run(*site.engines.serve())
    assert told(again) == ("exact", "used", "local")
    other = two.run(*site.engines.serve())
    assert (other["result"], other["errors"]) == ("none", {"untrusted": 2})
    author.sign_all(site.seed, time.time())
    assert told(two.run(*site.engines.serve(), CACHEMGR_TRUSTED_KEYS=author.public)) == ("exact", "used", "local")


def test_what_was_made_from_an_unsigned_seed_is_not_laundered(site: Site, author: Authority) -> None:
    """Its own capture holds kernels of the seed that nobody answered for; a stricter policy later asks for that."""
    pod = site.pod("pod", CACHEMGR_TRUST="local=off,seed=off")
    near = pod.run(*site.engines.serve("--max-model-len=16"))
    assert (near["result"], near["where"], near["published"] is not None) == ("near", "seed", True)
    own = LocalStore(pod.store)
    beside = [name for _key, names in listing(own).values() for name in names]
    assert [name.rpartition(".origin")[2] for name in beside] == [".json"]
    assert told(pod.run(*site.engines.serve("--max-model-len=16")))[0] == "exact"
    strict = pod.run(*site.engines.serve("--max-model-len=16"), CACHEMGR_TRUST="local=off,seed=require")
    assert strict["result"] == "none"
    assert strict["errors"] == {"untrusted": 1, "levels ignored": 1}


def test_a_store_that_others_can_write_is_not_believed_by_itself(site: Site, author: Authority) -> None:
    pod = site.pod("pod", CACHEMGR_SEED="", CACHEMGR_STORE=str(site.seed))
    os.chmod(str(site.seed), 0o777)
    cold = pod.run(*site.engines.serve(), CACHEMGR_PUBLISH="never")
    assert (cold["result"], cold["errors"]) == ("none", {"untrusted": 1})
    assert "so its captures need a signature, or set CACHEMGR_TRUST=local=off" in cold["stderr"]
    assert told(pod.run(*site.engines.serve(), CACHEMGR_PUBLISH="never", CACHEMGR_TRUST="local=off"))[0] == "exact"
    os.chmod(str(site.seed), 0o755)
    assert told(pod.run(*site.engines.serve(), CACHEMGR_PUBLISH="never"))[0] == "exact"


def test_a_capture_is_revoked_by_its_digest_and_a_key_by_its_id(site: Site, author: Authority) -> None:
    author.sign_all(site.seed, time.time())
    trusted = {"CACHEMGR_TRUSTED_KEYS": author.public}
    gone = site.start("one", **trusted, CACHEMGR_REVOKED=site.cold["published"])
    assert (gone["result"], gone["errors"]) == ("none", {"untrusted": 1})
    assert "is revoked" in gone["stderr"]
    stolen = site.start("two", **trusted, CACHEMGR_REVOKED=author.id)
    assert (stolen["result"], stolen["errors"]) == ("none", {"levels ignored": 1})
    unknown = site.start("three", **trusted, CACHEMGR_REVOKED="/no/such/list")
    assert unknown["result"] == "none"
    assert "so no key is trusted" in unknown["stderr"]


def test_lookup_says_what_is_not_trusted(site: Site, author: Authority) -> None:
    pod = site.pod("pod", CACHEMGR_TRUSTED_KEYS=author.public)
    words = ("lookup", "--", *site.engines.serve())
    assert "untrusted  capture " in pod.cachemgr(*words, code=1).stdout
    machine_readable = pod.cachemgr("lookup", "--json", "--", *site.engines.serve(), code=1)
    assert json.loads(machine_readable.stdout)["result"] == "none"
    assert "untrusted: capture " in machine_readable.stderr
    assert "ignored" in pod.cachemgr(*words, code=1, CACHEMGR_TRUSTED_KEYS="").stdout


def test_a_strict_start_under_require_is_cold_and_starts(site: Site, author: Authority) -> None:
    """Distrust is an answer and no failure of the cache."""
    cold = site.start("pod", CACHEMGR_TRUSTED_KEYS=author.public, CACHEMGR_STRICT="1")
    assert cold["exit_code"] == 0
    assert cold["verdict"] == "cold"


def test_trust_that_the_system_locks_is_not_loosened_by_the_environment(tmp_path: Path, author: Authority) -> None:
    from cachemgr.settings import load

    etc = tmp_path / "cachemgr.toml"
    locked = 'locked = ["trust", "trusted_keys", "revoked", "max_age"]'
    etc.write_text(f'trust = "require"\ntrusted_keys = ["{author.public}"]\n{locked}\n')
    settings = load(
        {"HOME": "/h", "CACHEMGR_TRUST": "off", "CACHEMGR_TRUSTED_KEYS": "", "CACHEMGR_MAX_AGE": "9999d"}, {}, etc=etc
    )
    assert (settings.trust, settings.trusted_keys, settings.max_age) == (("require",), (author.public,), None)
    with pytest.raises(CacheError, match="locked"):
        load({"HOME": "/h"}, {"trust": "off"}, etc=etc)


def test_a_plain_server_with_the_plugin_uses_what_its_policies_let_it(tmp_path: Path, author: Authority) -> None:
    fleet = Plugged.install(tmp_path)
    cold = plugged.run(fleet.machine("builder"), fleet.serve())
    assert cold.told[:2] == ("none", "cold")
    seed = LocalStore(tmp_path / "store")

    def pod(name: str, **variables: str) -> plugged.Run:
        own = {**fleet.variables, "CACHEMGR_SEED": str(seed), **variables}
        return plugged.run(Machine(tmp_path / name, tmp_path / f"{name}-store", own), fleet.serve())

    unsigned = pod("unsigned", CACHEMGR_TRUSTED_KEYS=author.public)
    assert unsigned.told[:2] == ("none", "cold")
    assert unsigned.entries == ["compiled"], "what the engine asked for by its own name is judged as well"
    assert "nobody has signed it" in unsigned.stderr
    warned = pod("warned", CACHEMGR_TRUST="warn")
    assert (warned.told, warned.entries) == (("exact", "used", 0), ["loaded"])
    assert "used although capture " in warned.stderr
    author.sign_all(seed, time.time())
    signed = pod("signed", CACHEMGR_TRUSTED_KEYS=author.public)
    assert (signed.told, signed.entries) == (("exact", "used", 0), ["loaded"])
    assert signed.answer == unsigned.answer == cold.answer
