"""`keygen` and `sign`: keys that are never overwritten or told, captures that are verified before anybody answers for
them, and what waits in `incoming/` let in whole or not at all.
"""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cachemgr.capture import Manifest
from cachemgr.clock import written
from cachemgr.errors import CorruptError, NotFoundError, StoreError, UntrustedError, UsageError
from cachemgr.key import derive
from cachemgr.machine import Machine
from cachemgr.sign import Candidate, candidates, require_origin, sign
from cachemgr.store import Store, layout
from cachemgr.store.captures import captures, has_layers
from cachemgr.store.incoming import Incoming
from cachemgr.store.local import LocalStore
from cachemgr.trust import Trust, TrustedKey, policies_of
from tests import machines
from tests.authorities import Authority
from tests.kills import killed_at_every_step
from tests.machines import Fleet
from tests.stores import Corrupting, Faulty, Recording, contents
from tests.trees import FACTORS, FEW, build, changed, draft, publish_trees

KEY = derive(FACTORS)
OTHER = changed("vllm.max_model_len", "16")
SIGNED = "2027-01-15T08:00:00Z"
NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def author() -> Authority:
    return Authority()


def trust(author: Authority, machine: Machine | None = None) -> Trust:
    keys = {author.id: TrustedKey(author.signer.public)}
    return Trust(policies_of((), private=True), machine, lambda: NOW, keys)


def waiting(store: Store, directory: Path, manifest: Manifest | None = None) -> None:
    """What a pod without a key publishes."""
    publish_trees(Incoming(store), build(directory, FEW), manifest or draft())


def named(store: Store, author: Authority, text: str = KEY) -> list[Candidate]:
    return candidates(store, text, trust(author), author.signer.public)


def sign_all(store: Store, author: Authority, text: str = KEY) -> None:
    for each in named(store, author, text):
        sign(store, each, author.signer, signed=SIGNED, expires=None)


def believed(store: Store, author: Authority) -> bool:
    by = trust(author)
    return bool(captures(store, KEY, [], judge=lambda *about: by.standing("require", *about)))


def test_what_waits_is_seen_by_nobody_until_it_is_signed(tmp_path: Path, store: Store, author: Authority) -> None:
    waiting(store, tmp_path / "live")
    assert captures(store, KEY, []) == ()
    (candidate,) = named(store, author)
    assert (candidate.waiting, candidate.by, candidate.signatures) == (True, "", ())
    sign(store, candidate, author.signer, signed=SIGNED, expires=None)
    (capture,) = captures(store, KEY, [])
    assert has_layers(store, capture)
    assert capture.manifest == candidate.capture.manifest
    assert believed(store, author)
    assert {entry.name for entry in Incoming(store).scan("")} == {"layout.json", "CACHEDIR.TAG"}
    assert [name for name in contents(store) if name.startswith("entries/")]


def test_a_layer_that_another_waiting_capture_needs_keeps_waiting(
    tmp_path: Path, store: Store, author: Authority
) -> None:
    waiting(store, tmp_path / "live")
    waiting(store, tmp_path / "live", draft(OTHER))
    sign_all(store, author)
    (other,) = captures(Incoming(store), derive(OTHER), [])
    assert has_layers(Incoming(store), other)
    sign_all(store, author, derive(OTHER))
    assert not list(Incoming(store).scan("layers/"))


def test_what_is_damaged_is_not_signed(tmp_path: Path, store: Store, author: Authority) -> None:
    waiting(store, tmp_path / "live")
    for prefix, error in (("incoming/layers/", CorruptError), ("incoming/artifacts/", CorruptError)):
        with pytest.raises(error):
            sign_all(Corrupting(store, prefix), author)
        assert not [name for name in contents(store) if name.startswith(("artifacts/", "layers/"))]
    (layer,) = [entry.name for entry in store.scan("incoming/layers/")]
    store.delete(layer)
    with pytest.raises(NotFoundError):
        sign_all(store, author)
    assert not [name for name in contents(store) if name.endswith(".sig")]


def test_a_layer_with_other_files_than_its_manifest_says_is_not_signed(
    tmp_path: Path, store: Store, author: Authority
) -> None:
    """The digest of the compressed bytes is right, and what is inside is not what the manifest promises."""
    import msgspec

    from cachemgr.store.captures import enter, no_marks

    publish_trees(store, build(tmp_path / "live", FEW))
    (capture,) = captures(store, KEY, [])
    (layer,) = capture.manifest.layers
    section = layer.sections[0]
    unit = section.units[0]
    file = msgspec.structs.replace(unit.files[0], digest="sha256:" + "0" * 64)
    unit = msgspec.structs.replace(unit, files=(file, *unit.files[1:]))
    section = msgspec.structs.replace(section, units=(unit, *section.units[1:]))
    lying = msgspec.structs.replace(layer, sections=(section, *layer.sections[1:]))
    enter(store, msgspec.structs.replace(capture.manifest, layers=(lying,), launch="lying"), no_marks)
    (lie,) = [each for each in named(store, author) if each.capture.manifest.launch == "lying"]
    with pytest.raises(CorruptError, match="has other bytes than its manifest says"):
        sign(store, lie, author.signer, signed=SIGNED, expires=None)


def test_nobody_answers_for_what_he_neither_made_nor_verified(tmp_path: Path, store: Store, author: Authority) -> None:
    publish_trees(store, build(tmp_path / "live", FEW))
    with pytest.raises(UntrustedError, match="nobody has signed it") as caught:
        require_origin(named(store, author))
    assert "--accept-unverified-origin" in (caught.value.hint or "")
    machine = Machine(tmp_path / "key")
    (capture,) = captures(store, KEY, [])
    for name, mark in machine.mark(KEY, capture.digest).items():
        store.put(name, mark)
    require_origin(candidates(store, KEY, trust(author, machine), author.signer.public))
    successor = Authority()
    author.sign_all(store, NOW)
    require_origin(candidates(store, KEY, trust(author), successor.signer.public))


def test_a_forged_or_expired_signature_of_ours_counts_for_nothing(
    tmp_path: Path, store: Store, author: Authority
) -> None:
    publish_trees(store, build(tmp_path / "live", FEW))
    (one,) = named(store, author)
    forged = layout.signature_name(KEY, one.capture.digest, author.id, written(NOW))
    store.put(forged, b"a forgery")
    (one,) = named(store, author)
    assert (one.signed, one.signatures) == (False, (forged,))
    sign(store, one, author.signer, signed=written(NOW - 9), expires=written(NOW))
    (one,) = named(store, author)
    assert not one.signed, "that has expired"
    assert forged not in one.signatures
    sign(store, one, author.signer, signed=written(NOW + 3), expires=None)
    assert named(store, author)[0].signed


def test_a_signature_is_renewed_and_no_moment_is_without_one(tmp_path: Path, store: Store, author: Authority) -> None:
    publish_trees(store, build(tmp_path / "live", FEW))
    author.sign_all(store, NOW - 1)
    (candidate,) = named(store, author)
    recording = Recording(store)
    sign(recording, candidate, author.signer, signed=written(NOW), expires=None)
    assert [verb for verb, _name in recording.writes()] == ["refresh", "put", "delete"], "the layer is looked at first"
    (again,) = named(store, author)
    (name,) = again.signatures
    assert (name not in candidate.signatures, again.by) == (True, f"key {author.id}")


def test_what_is_revoked_is_signed_by_nobody(tmp_path: Path, store: Store, author: Authority) -> None:
    publish_trees(store, build(tmp_path / "live", FEW))
    (capture,) = captures(store, KEY, [])
    by = replace(trust(author), revoked=frozenset({capture.digest}))
    with pytest.raises(UntrustedError, match="is revoked"):
        require_origin(candidates(store, KEY, by, author.signer.public), by.revoked, accept=True)


def test_a_capture_is_named_by_its_digest_too(tmp_path: Path, store: Store, author: Authority) -> None:
    waiting(store, tmp_path / "live")
    publish_trees(store, build(tmp_path / "other", FEW), draft(launch="other"))
    first, second = named(store, author)
    assert [first.waiting, second.waiting] == [True, False]
    (found,) = named(store, author, second.capture.digest[:20])
    assert found.capture.digest == second.capture.digest
    with pytest.raises(NotFoundError):
        named(store, author, "sha256:000000")
    with pytest.raises(NotFoundError):
        named(store, author, "sha256:")
    with pytest.raises(UsageError, match="names no artifact"):
        named(store, author, "k1:")


@pytest.mark.slow
def test_signing_what_waits_killed_anywhere_loses_nothing(tmp_path: Path, author: Authority) -> None:
    pristine, place = tmp_path / "pristine", tmp_path / "store"
    waiting(LocalStore(pristine), tmp_path / "live")
    shutil.copytree(pristine, place)
    for _step in killed_at_every_step(lambda: sign_all(LocalStore(place), author)):
        store = LocalStore(place)
        there = captures(store, KEY, [])
        assert all(has_layers(store, capture) for capture in there)
        assert bool(there) == believed(store, author), "in sight is what is signed"
        if there:
            assert len(there) == 1
        sign_all(store, author)
        assert believed(store, author)
        shutil.rmtree(place)
        shutil.copytree(pristine, place)


def test_signing_that_fails_anywhere_leaves_what_waited(tmp_path: Path, author: Authority) -> None:
    for number in range(20):
        store = LocalStore(tmp_path / str(number))
        waiting(store, tmp_path / "live")
        try:
            sign_all(Faulty(store, fail_after=number), author)
        except StoreError:
            assert named(store, author)
            sign_all(store, author)
            assert believed(store, author)
        else:
            assert number > 4
            return
    pytest.fail("it never got through")


# As commands.


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_keygen_makes_a_key_that_sign_uses_and_others_trust(fleet: Fleet, tmp_path: Path) -> None:
    builder, pod = fleet.machine("builder"), fleet.machine("pod")
    made = builder.json("keygen", "signing.pem")
    private = builder.root / "signing.pem"
    assert private.stat().st_mode & 0o777 == 0o600
    assert (builder.root / "signing.pem.pub").read_text().startswith(made["public"])
    key = builder.run(*fleet.command("f"))["key"]
    signed = builder.json("sign", key, "--key", "signing.pem")
    assert (signed["signer"], [each["by"] for each in signed["signed"]]) == (made["id"], ["this machine"])
    assert builder.json("sign", key, "--key", "signing.pem")["signed"] == []
    assert "is signed by key" in builder.cachemgr("sign", key, "--key", "signing.pem").stderr
    warm = pod.run(*fleet.command("f"), CACHEMGR_TRUST="require", CACHEMGR_TRUSTED_KEYS=made["public"])
    assert (warm["result"], warm["verdict"]) == ("exact", "used")
    shown = pod.cachemgr("show", key, CACHEMGR_TRUSTED_KEYS=f"{private}.pub").stdout
    assert f"answered for by key {made['id']}" in shown
    assert "nobody has signed it" not in shown
    assert f"key {made['id']} is not a trusted one" in pod.cachemgr("show", key).stdout
    assert "answered for by this machine" in builder.cachemgr("show", key).stdout


def test_a_key_is_never_overwritten(fleet: Fleet) -> None:
    machine = fleet.machine("one")
    machine.cachemgr("keygen", "key")
    before = (machine.root / "key").read_bytes()
    assert "is never overwritten" in machine.cachemgr("keygen", "key", code=2).stderr
    assert (machine.root / "key").read_bytes() == before
    (machine.root / "second.pub").write_text("kept")
    machine.cachemgr("keygen", "second", code=2)
    assert not (machine.root / "second").exists(), "half a pair is of no use"
    (machine.root / "third").symlink_to(machine.root / "elsewhere")
    machine.cachemgr("keygen", "third", code=2)
    assert not (machine.root / "elsewhere").exists()


def test_a_key_comes_from_a_file_a_variable_or_a_command_and_is_never_told(fleet: Fleet, author: Authority) -> None:
    machine = fleet.machine("one")
    key = machine.run(*fleet.command("f"))["key"]
    path = author.file(fleet.directory)
    secret = author.pem.decode().splitlines()[1]
    for where in (str(path), "env:PEM", f"command:cat '{path}'"):
        done = machine.cachemgr("sign", key, "--again", CACHEMGR_SIGN_KEY=where, PEM=author.pem.decode())
        assert "signed capture" in done.stderr, where
        assert secret not in done.stdout + done.stderr
    config = machine.cachemgr("config", "show", CACHEMGR_SIGN_KEY=author.pem.decode(), code=2)
    assert "must not be one" in config.stderr
    assert secret not in config.stderr


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("absent.pem", "cannot be read"),
        ("env:ABSENT", "is not set"),
        ("command:false", "gave no key"),
        ("command:no-such-command", "cannot be executed"),
        ("command:", "nothing follows `command:`"),
        ("command:'", "is no command"),
        ("command:echo hello", "no Ed25519 private key"),
        ("open.pem", "so that others can use it"),
    ],
)
def test_a_key_that_cannot_be_had_is_said(where: str, says: str, fleet: Fleet, author: Authority) -> None:
    machine = fleet.machine("one")
    machine.make_places()
    author.file(machine.root, "open.pem").chmod(0o644)
    said = machine.cachemgr("sign", "k1:0", "--key", where, code=2).stderr
    assert says in said
    assert "\nhint: " in said


def test_what_a_pod_publishes_waits_and_is_promoted_with_an_explicit_word(
    fleet: Fleet, tmp_path: Path, author: Authority
) -> None:
    store = LocalStore(tmp_path / "store")
    waiting(store, tmp_path / "live")
    machine = fleet.machine("gate")
    path = str(author.file(tmp_path))
    refused = machine.cachemgr("sign", KEY, "--key", path, code=12)
    assert "anybody may have written that" in refused.stderr
    assert "--accept-unverified-origin" in refused.stderr
    assert machine.cachemgr("ls", "-q").stdout == ""
    assert machine.cachemgr("ls", "-q", "--waiting").stdout == f"{KEY}\n"
    assert "nobody has signed it" in machine.cachemgr("show", KEY, "--waiting").stdout
    assert "would remove 1 artifact" in machine.cachemgr("rm", KEY, "--waiting", "--dry-run").stderr
    dry = machine.cachemgr("sign", KEY, "--key", path, "--accept-unverified-origin", "--dry-run")
    assert "would sign capture" in dry.stderr
    assert captures(store, KEY, []) == ()
    done = machine.cachemgr("sign", KEY, "--key", path, "--accept-unverified-origin", "--expires", "90d")
    assert "which waited" in done.stderr
    assert believed(store, author)


def test_signing_needs_a_key_and_a_name(fleet: Fleet, author: Authority) -> None:
    machine = fleet.machine("one")
    assert "hint: cachemgr keygen FILE" in machine.cachemgr("sign", "k1:0", code=2).stderr
    path = str(author.file(fleet.directory))
    assert "nothing in" in machine.cachemgr("sign", "k1:0", "--key", path, code=10).stderr
    assert "such as 30d" in machine.cachemgr("sign", "k1:0", "--key", path, "--expires", "soon", code=2).stderr
    machine.cachemgr("sign", code=2)


def test_cryptography_is_imported_only_where_something_is_signed_or_verified(fleet: Fleet, author: Authority) -> None:
    machine: machines.Machine = fleet.machine("one")
    machine.run(*fleet.command("f"))
    tell = "print('cryptography' in sys.modules)"
    code = f"import sys\nfrom cachemgr.cli import cli\ntry: cli(sys.argv[1:])\nexcept SystemExit: pass\n{tell}"
    for policy in ("off", "require"):
        words = [sys.executable, "-c", code, "lookup", "--", *fleet.command("f")]
        done = subprocess.run(
            words,
            env={**machine.environ, "CACHEMGR_TRUST": policy, "CACHEMGR_TRUSTED_KEYS": author.public},
            cwd=machine.root,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "exact" in done.stdout
        assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_a_key_that_openssl_made_is_one(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "openssl.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", path], check=True, capture_output=True)
    stranger = Authority(path.read_bytes())
    publish_trees(store, build(tmp_path / "live", FEW))
    sign_all(store, stranger)
    assert believed(store, stranger)
