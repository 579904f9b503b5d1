"""Trust: which captures may be used under which policy, and what no forger, thief or old signature gets past."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from cachemgr.clock import epoch, written
from cachemgr.digest import Digest
from cachemgr.errors import UntrustedError, UsageError
from cachemgr.key import Relations, derive
from cachemgr.level import Level
from cachemgr.lookup import Found, find
from cachemgr.machine import Machine
from cachemgr.signature import Signer, public_key, verified
from cachemgr.store import Store, layout
from cachemgr.store.captures import Capture, captures
from cachemgr.trust import HERE, Origin, Policy, Trust, TrustedKey, open_trust, policies_of, revoked_names, trusted_keys
from tests.authorities import Authority
from tests.stores import Recording
from tests.trees import FACTORS, build, changed, draft, publish_trees, restore_found, targets

pytestmark = pytest.mark.full

KEY = derive(FACTORS)
NOW = 1_800_000_000.0
DAY = 86_400.0


@pytest.fixture(scope="module")
def author() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def thief() -> Authority:
    return Authority()


@pytest.fixture
def made(tmp_path: Path, store: Store) -> Store:
    """A store with one capture."""
    publish_trees(store, build(tmp_path / "live", ["triton", "torch_compile"]))
    return store


def trust(*authors: Authority, policy: Policy = "require", machine: Machine | None = None) -> Trust:
    keys = {each.id: TrustedKey(each.signer.public) for each in authors}
    return Trust(policies_of((policy,), private=True), machine, lambda: NOW, keys)


def judged(store: Store, by: Trust, policy: Policy = "require") -> Found:
    """What a look-up finds in a store that is read under `policy`."""
    level = Level("seed", store, policy, judge=partial(by.standing, policy), closed=by.closed("seed", policy))
    return find([level], KEY, FACTORS, Relations())


def only(store: Store) -> Capture:
    (capture,) = captures(store, KEY, [])
    return capture


def answered(found: Found) -> str:
    """Who answers for the first capture that was found."""
    assert found.captures[0].standing is not None
    return found.captures[0].standing.by


def signature_of(store: Store, author: Authority) -> tuple[str, bytes]:
    name = layout.signature_name(KEY, only(store).digest, author.id, written(NOW))
    return name, store.read(name, limit=9999)


def test_what_a_trusted_key_has_signed_is_used(made: Store, author: Authority) -> None:
    author.sign_all(made, NOW)
    found = judged(made, trust(author))
    assert (found.result, found.untrusted, found.doubts) == ("exact", (), ())
    assert answered(found) == f"key {author.id}"


def test_what_nobody_has_signed_is_not(made: Store, author: Authority) -> None:
    found = judged(made, trust(author))
    assert (found.result, found.captures) == ("none", ())
    assert {each.kind for each in found.damaged} == {"untrusted"}
    assert "nobody has signed it" in found.untrusted[0].reason


def test_warn_uses_it_and_says_so_and_off_asks_nobody(made: Store, author: Authority) -> None:
    warned = judged(made, trust(author), "warn")
    assert warned.result == "exact"
    assert "nobody has signed it" in warned.doubts[0]
    off = judged(made, trust(author), "off")
    assert (off.result, off.doubts) == ("exact", ())


def test_a_level_without_a_trusted_key_is_not_read_at_all(made: Store) -> None:
    recording = Recording(made)
    found = judged(recording, trust())
    assert recording.calls == []
    assert found.result == "none"
    (said,) = found.ignored
    assert "ignored: no trusted key; set CACHEMGR_TRUSTED_KEYS, or, accepting that" in said
    assert said.endswith("CACHEMGR_TRUST=seed=off")


def test_a_manifest_that_is_not_trusted_is_not_parsed(
    made: Store, author: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_more: object) -> None:
        raise AssertionError("an unsigned manifest was parsed")

    monkeypatch.setattr("cachemgr.store.captures.decode_manifest", refuse)
    assert judged(made, trust(author)).result == "none"


def forged(statement: dict[str, object], author: Authority) -> bytes:
    """A signature object with this statement and a signature over other bytes."""
    honest = author.signer.sign(Digest("sha256:" + "0" * 64), KEY, signed=written(NOW))
    return msgspec.json.encode(msgspec.json.decode(honest) | {"statement": statement}, order="sorted")


Change = Callable[[bytes, Authority, Authority], bytes]
TAMPERED: dict[str, Change] = {
    "a flipped bit in the signature": lambda data, *_: data.replace(data[14:16], bytes([data[14] ^ 1, data[15]]), 1),
    "a later time": lambda data, *_: data.replace(b"2027-01-15", b"2027-01-16"),
    "an end that was never signed": lambda data, *_: data.replace(
        b'"expires":null', b'"expires":"2999-01-01T00:00:00Z"'
    ),
    "another capture": lambda data, *_: data.replace(b"sha256:", b"sha256:00", 1)[:-2] + b"}}",
    "a key that was never signed": lambda data, *_: data.replace(KEY.encode(), b"k1:" + b"0" * 32),
    "the name of another signer": lambda data, _a, thief: data.replace(_a.id.encode(), thief.id.encode()),
    "white space": lambda data, *_: data + b"\n",
    "a field more": lambda data, *_: data[:-1] + b',"z":1}',
    "a field twice": lambda data, *_: data[:-1] + b',"statement":' + data.split(b'"statement":')[1],
    "another version": lambda data, *_: data.replace(b'"version":1', b'"version":2'),
    "version 0": lambda data, *_: data.replace(b'"version":1', b'"version":0'),
    "nothing": lambda *_: b"",
    "no JSON": lambda *_: b"{",
    "deep JSON": lambda *_: b"[" * 4000,
    "invalid UTF-8": lambda *_: b"\xff\xfe",
    "too many bytes": lambda data, *_: data + b" " * 5000,
    "an empty signature": lambda data, *_: b'{"signature":""' + data[data.index(b',"statement"') :],
    "a signature of zeroes": lambda data, *_: (
        b'{"signature":"' + b"A" * 86 + b'=="' + data[data.index(b',"statement"') :]
    ),
    "a time that is none": lambda data, *_: data.replace(b"2027-01-15", b"2027-02-31"),
    "a time with digits of another script": lambda data, *_: data.replace(b"2027-", "٢٠٢٧-".encode()),
}


@pytest.mark.parametrize("change", TAMPERED)
def test_a_signature_that_was_tampered_with_counts_for_nothing(
    change: str, made: Store, author: Authority, thief: Authority
) -> None:
    author.sign_all(made, NOW)
    name, data = signature_of(made, author)
    tampered = TAMPERED[change](data, author, thief)
    assert tampered != data
    made.delete(name)
    made.put(name, tampered)
    found = judged(made, trust(author, thief))
    assert (found.result, found.captures) == ("none", ())
    assert {each.kind for each in found.damaged} == {"untrusted"}


def test_a_signature_of_somebody_else_counts_for_nothing(made: Store, author: Authority, thief: Authority) -> None:
    thief.sign_all(made, NOW)
    found = judged(made, trust(author))
    assert f"key {thief.id} is not a trusted one" in found.untrusted[0].reason
    _name, data = signature_of(made, thief)
    made.put(layout.signature_name(KEY, only(made).digest, author.id, written(NOW)), data)
    assert "is about something else" in judged(made, trust(author)).untrusted[0].reason


def test_one_trusted_signature_of_several_is_enough(made: Store, author: Authority, thief: Authority) -> None:
    third = Authority()
    for each in (author, thief, third):
        each.sign_all(made, NOW)
    for trusted in (author, thief, third):
        assert answered(judged(made, trust(trusted))) == f"key {trusted.id}"


def test_a_heap_of_forged_signatures_is_not_looked_through(made: Store, author: Authority) -> None:
    capture = only(made).digest
    for number in range(40):
        made.put(layout.signature_name(KEY, capture, author.id, written(NOW + number)), b"{}")
    recording = Recording(made)
    assert judged(recording, trust(author)).untrusted
    assert len([name for name in recording.opened() if name.endswith(".sig")]) <= 32, "a look-up judges twice at most"


def test_a_signature_of_one_capture_does_not_serve_another(tmp_path: Path, made: Store, author: Authority) -> None:
    author.sign_all(made, NOW)
    name, data = signature_of(made, author)
    publish_trees(made, build(tmp_path / "other"), draft(launch="other"))
    unsigned = next(each.digest for each in captures(made, KEY, []) if each.digest[7:] not in name)
    made.put(layout.signature_name(KEY, unsigned, author.id, written(NOW)), data)
    found = judged(made, trust(author))
    assert unsigned not in {each.digest for each in found.captures}
    assert "is about something else" in found.untrusted[0].reason


def test_a_capture_under_another_key_is_refused_before_its_signature_helps(made: Store, author: Authority) -> None:
    """Moving a signed capture to a key that it was not made for would hand out somebody else's code."""
    author.sign_all(made, NOW)
    capture = only(made)
    other = derive(changed("vllm.max_model_len", "16"))
    for name in (layout.manifest_name(KEY, capture.digest), signature_of(made, author)[0]):
        made.put(name.replace(KEY.replace(":", "-"), other.replace(":", "-")), made.read(name, limit=1 << 20))
    damaged: list[str] = []
    level = Level("seed", made, "require", judge=partial(trust(author).standing, "require"))
    found = find([level], other, changed("vllm.max_model_len", "16"), Relations())
    damaged += [each.reason for each in found.damaged]
    assert found.artifact != other
    assert "is about something else" in damaged[0]


def test_a_time_decides_what_a_signature_is_worth(made: Store, author: Authority) -> None:
    def at(signed: float, expires: float | None = None, max_age: float | None = None) -> str:
        author.sign_all(made, signed, expires)
        found = judged(made, replace(trust(author), max_age=max_age))
        return found.untrusted[0].reason if found.untrusted else found.result

    assert at(NOW - 900 * DAY) == "exact"
    assert at(NOW + 60) == "exact", "clocks differ"
    assert "is from the future" in at(NOW + 3600)
    assert at(NOW - DAY, expires=NOW + 1) == "exact"
    assert "has expired on" in at(NOW - DAY, expires=NOW)
    assert at(NOW - 2 * DAY, max_age=3 * DAY) == "exact"
    assert "is too old" in at(NOW - 4 * DAY, max_age=3 * DAY)


def test_a_key_that_has_expired_or_is_revoked_vouches_for_nothing_whenever_it_signed(
    made: Store, author: Authority, thief: Authority
) -> None:
    author.sign_all(made, NOW - 100 * DAY)
    public = author.signer.public
    ended = replace(trust(thief), keys={author.id: TrustedKey(public, NOW), **trust(thief).keys})
    assert f"key {author.id} has expired" in judged(made, ended).untrusted[0].reason
    lives = replace(ended, keys={author.id: TrustedKey(public, NOW + 1)})
    assert judged(made, lives).result == "exact"
    revoked = replace(trust(author, thief), revoked=frozenset({author.id}))
    assert f"key {author.id} is revoked" in judged(made, revoked).untrusted[0].reason
    thief.sign_all(made, NOW)  # here an honest one, who signs the same again
    assert answered(judged(made, revoked)) == f"key {thief.id}"


def test_a_level_whose_keys_have_all_ended_is_closed(made: Store, author: Authority) -> None:
    author.sign_all(made, NOW)
    revoked = replace(trust(author), revoked=frozenset({author.id}))
    assert "no trusted key" in judged(made, revoked).ignored[0]


@pytest.mark.parametrize("policy", ["require", "warn", "off"])
def test_a_revoked_capture_is_never_used_and_no_signature_brings_it_back(
    policy: Policy, tmp_path: Path, made: Store, author: Authority
) -> None:
    author.sign_all(made, NOW)
    old = only(made).digest
    by = replace(trust(author), revoked=frozenset({old}))
    assert "is revoked" in judged(made, by, policy).untrusted[0].reason
    publish_trees(made, build(tmp_path / "new"), draft(launch="new"))
    author.sign_all(made, NOW + 1)  # the same key and artifact, signed again, with the old capture beside it
    found = judged(made, by, policy)
    assert found.result == "exact"
    assert old not in {capture.digest for capture in found.captures}


def test_a_revocation_list_that_cannot_be_read_trusts_no_key(tmp_path: Path, author: Authority, made: Store) -> None:
    author.sign_all(made, NOW)
    for revoked in ((f"{tmp_path}/absent",), ("not-an-id",)):
        opened = open_trust(
            (author.public,), revoked, policies_of((), private=True), machine=Machine(tmp_path / "key"), max_age=None,
            now=lambda: NOW,
        )  # fmt: skip
        assert "no key is trusted" in opened.faults[-1]
        assert judged(made, opened).ignored
    known = (only(made).digest, f"{tmp_path}/absent")
    opened = open_trust(
        (author.public,), known, policies_of(("off",), private=True), machine=Machine(tmp_path / "key"), max_age=None,
        now=lambda: NOW,
    )  # fmt: skip
    assert "is revoked" in judged(made, opened, "off").untrusted[0].reason, (
        "what could be read counts under each policy"
    )


def test_an_origin_asks_for_more_than_the_level_does(made: Store, author: Authority) -> None:
    name = layout.origin_name(KEY, only(made).digest)
    made.put(name, Origin("mirror", "s3://bucket", written(NOW)).encoded())
    by = replace(trust(author), policies=policies_of(("local=off",), private=True))
    assert "nobody has signed it" in judged(made, by, "off").untrusted[0].reason
    assert judged(made, replace(by, policies=policies_of(("off",), private=True)), "off").result == "exact"
    warned = judged(made, replace(by, policies=policies_of(("mirror=warn",), private=True)), "off")
    assert (warned.result, len(warned.doubts)) == ("exact", 1)
    author.sign_all(made, NOW)
    assert answered(judged(made, by, "off")) == f"key {author.id}"


@pytest.mark.parametrize("data", [b"", b"{", b'{"where":"moon"}', b"\xff", b" " * 9999])
def test_an_origin_that_cannot_be_read_asks_for_everything(data: bytes, made: Store, author: Authority) -> None:
    made.put(layout.origin_name(KEY, only(made).digest), data)
    by = replace(trust(author), policies=policies_of(("off", "mirror=require"), private=True))
    assert judged(made, by, "off").untrusted
    assert judged(made, replace(by, policies=policies_of(("off",), private=True)), "off").result == "exact"


def test_an_origin_is_handed_down(tmp_path: Path, made: Store, author: Authority) -> None:
    """What was made of a capture that was pulled from a mirror is of that mirror, although it lay in our own store."""
    by = replace(trust(author, machine=Machine(tmp_path / "key")), policies=policies_of(("off",), private=True))
    capture = only(made).digest
    made.put(layout.origin_name(KEY, capture), Origin("mirror", "s3://bucket", written(NOW), ("seed",)).encoded())
    ((_name, data),) = by.marks(judged(made, by, "off").captures, "local", made)(KEY, capture).items()
    handed = msgspec.json.decode(data, type=Origin)
    assert {handed.where, *handed.also} == {"mirror", "seed"}


def test_an_origin_is_seen_also_by_a_listing_that_began_before_it(made: Store, author: Authority) -> None:
    made.put(layout.origin_name(KEY, only(made).digest), Origin("seed", "/s", written(NOW)).encoded())
    by = replace(trust(author), policies=policies_of(("local=off",), private=True))
    with pytest.raises(UntrustedError):
        by.standing("off", made, KEY, only(made).digest, ())


def test_what_nobody_was_asked_about_is_not_restored(tmp_path: Path, made: Store) -> None:
    """Who forgets to ask fails closed."""
    found = msgspec.structs.replace(judged(made, trust(policy="off"), "off"), captures=captures(made, KEY, []))
    with pytest.raises(UntrustedError, match="nobody was asked"):
        restore_found(made, found, targets(tmp_path / "room"))
    assert not (tmp_path / "room").exists()


# This machine.


def marked(store: Store, machine: Machine) -> None:
    for name, data in machine.mark(KEY, only(store).digest).items():
        store.put(name, data)


def test_what_this_machine_made_counts_everywhere_and_nobody_elses_does(
    tmp_path: Path, made: Store, author: Authority
) -> None:
    here, there = Machine(tmp_path / "here"), Machine(tmp_path / "there")
    marked(made, here)
    assert answered(judged(made, trust(author, machine=here))) == HERE
    assert judged(made, trust(author, machine=there)).result == "none"
    marked(made, there)
    assert answered(judged(made, trust(author, machine=there))) == HERE


def test_the_key_of_a_machine_is_private_and_stays(tmp_path: Path, made: Store, author: Authority) -> None:
    path = tmp_path / "state" / "machine.key"
    marked(made, Machine(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path]
    assert judged(made, trust(author, machine=Machine(path))).result == "exact"


@pytest.mark.parametrize("spoil", ["readable", "short", "a link", "a pipe"])
def test_a_key_that_others_may_know_vouches_for_nothing(
    spoil: str, tmp_path: Path, made: Store, author: Authority
) -> None:
    path = tmp_path / "machine.key"
    marked(made, Machine(path))
    if spoil == "readable":
        path.chmod(0o644)
    elif spoil == "short":
        path.write_bytes(b"")
    elif spoil == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        os.mkfifo(path, 0o600)
    assert judged(made, trust(author, machine=Machine(path))).result == "none"
    assert Machine(path).mark(KEY, only(made).digest) == {}


def test_a_mark_does_not_serve_another_capture_or_key(tmp_path: Path, made: Store) -> None:
    here = Machine(tmp_path / "key")
    marked(made, here)
    capture = only(made).digest
    (name,) = here.mark(KEY, capture)
    other = Digest("sha256:" + "1" * 64)
    mark = made.read(name, limit=999)
    moved = name.replace(capture[7:], other[7:])
    made.put(moved, mark)
    assert here.made(made, KEY, capture, [name])
    assert not here.made(made, KEY, other, [moved])
    assert not here.made(made, KEY, capture, []), "it has to lie beside the manifest"


def test_what_is_made_of_doubtful_captures_gets_their_origin_and_not_our_mark(
    tmp_path: Path, made: Store, author: Authority
) -> None:
    machine = Machine(tmp_path / "key")
    by = trust(author, machine=machine)
    capture = only(made).digest
    own = set(machine.mark(KEY, capture))
    doubtful = judged(made, by, "off")
    (name,) = by.marks(doubtful.captures, "seed", made)(KEY, capture)
    assert name == layout.origin_name(KEY, capture)
    author.sign_all(made, NOW)
    assert set(by.marks(judged(made, by, "off").captures, "seed", made)(KEY, capture)) == own
    assert set(by.marks((), None, None)(KEY, capture)) == own, "made of nothing"


# Words of settings.


def test_policies_are_named_at_once_or_by_level() -> None:
    assert policies_of((), private=True) == {"local": "off", "seed": "require", "mirror": "require", "image": "require"}
    assert policies_of((), private=False)["local"] == "require"
    assert policies_of(("warn",), private=True) == dict.fromkeys(("local", "seed", "mirror", "image"), "warn")
    assert policies_of(("require", "seed=off"), private=True) == {
        "local": "require",
        "seed": "off",
        "mirror": "require",
        "image": "require",
    }


def test_trusted_keys_come_inline_and_from_files_with_their_ends(
    tmp_path: Path, author: Authority, thief: Authority
) -> None:
    (tmp_path / "keys").write_text(f"# ours\n{thief.public} expires=2027-06-01T00:00:00Z  # until summer\n\n")
    faults: list[str] = []
    found = trusted_keys((author.public, f"{tmp_path}/keys"), faults)
    assert faults == []
    assert {name: each.expires for name, each in found.items()} == {
        author.id: None,
        thief.id: epoch("2027-06-01T00:00:00Z"),
    }


@pytest.mark.parametrize(
    "words",
    [
        ("ed25519:AAAA",),
        ("ssh-ed25519",),
        ("expires=2027-06-01T00:00:00Z",),
        ("/no/such/file",),
        ("ed25519:" + "A" * 43 + "B",),
    ],
)
def test_what_is_no_key_is_said_and_trusts_nobody(words: tuple[str, ...]) -> None:
    faults: list[str] = []
    assert trusted_keys(words, faults) == {}
    assert len(faults) == 1


def test_a_key_whose_end_cannot_be_read_is_not_trusted(author: Authority) -> None:
    faults: list[str] = []
    assert trusted_keys((author.public, "expires=soon"), faults) == {}
    after = trusted_keys((author.public, "ed25519:AAAA", "expires=2001-01-01T00:00:00Z"), faults)
    assert [(key.public, key.expires) for key in after.values()] == [(author.signer.public, None)]
    assert len(faults) == 3


def test_revoked_names_are_keys_and_captures(tmp_path: Path, author: Authority) -> None:
    capture = "sha256:" + "a" * 64
    (tmp_path / "revoked").write_text(f"{author.id}\n{capture} # bad build\n")
    assert revoked_names((f"{tmp_path}/revoked",), []) == frozenset({author.id, capture})


# Keys.


@pytest.mark.parametrize("text", ["", "ed25519:", "ed25519:" + "A" * 44, "ed25519:" + "A" * 43 + "= ", "A" * 43 + "="])
def test_a_public_key_has_one_spelling(text: str) -> None:
    with pytest.raises(UsageError, match="is no public key"):
        public_key(text)


def test_a_private_key_that_is_none_is_said_without_a_part_of_it(author: Authority) -> None:
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    curve = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for pem in (b"", b"secret words", author.pem[:60], curve):
        with pytest.raises(UsageError, match="no Ed25519 private key in a file") as caught:
            Signer(pem, where="a file")
        assert "secret" not in str(caught.value)
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    locked = load_pem_private_key(author.pem, None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")
    )
    with pytest.raises(UsageError, match="needs a password"):
        Signer(locked, where="a file")


def test_a_signature_for_another_purpose_is_none_for_a_capture(made: Store, author: Authority) -> None:
    """Who gets a key to sign bytes for another protocol must not be able to use that here."""
    import base64

    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    author.sign_all(made, NOW)
    _name, data = signature_of(made, author)
    whole = msgspec.json.decode(data)
    naked = msgspec.json.encode(whole["statement"], order="sorted")
    private = load_pem_private_key(author.pem, None)
    whole["signature"] = base64.b64encode(private.sign(naked)).decode()  # type: ignore[union-attr, call-arg]
    with pytest.raises(UntrustedError, match="forged or damaged"):
        verified(msgspec.json.encode(whole, order="sorted"), only(made).digest, KEY, author.signer.public)


def test_the_form_of_a_signature_never_changes(author: Authority) -> None:
    capture = Digest("sha256:" + "a" * 64)
    signer = Signer(GOLDEN_KEY, where="a test")
    assert signer.sign(capture, KEY, signed="2027-01-15T08:00:00Z") == GOLDEN
    assert verified(GOLDEN, capture, KEY, signer.public).signed == "2027-01-15T08:00:00Z"


GOLDEN_KEY = b"""-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f
-----END PRIVATE KEY-----
"""
GOLDEN = (
    b'{"signature":"i1lZnP/n5IE4Vuhc1FTtu4+ggV9doLiQT9JLGnETeAmG9gPAOO6WxbeG9eW2s5mpJjRYhtdU6sFcOqrsLWBqCw=="'
    b',"statement":{"capture":"sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","expires":null'
    b',"key":"k1:04185ae3fafe6d2e887e15e538e24a1e","signed":"2027-01-15T08:00:00Z"'
    b',"signer":"a75d103bb867e82ec1842bcb72af3aa9","version":1}}'
)
