"""A fleet with a mirror: real processes, and a real S3 server between machines that have nothing else in common."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachemgr.store import Store, layout
from cachemgr.store.incoming import Incoming
from cachemgr.store.local import LocalStore
from cachemgr.store.s3 import S3Store
from tests import s3_faults
from tests.machines import Fleet, Machine, install_stand_in
from tests.s3_server import S3Server
from tests.test_crash import visible

pytestmark = pytest.mark.slow

PATIENCE = 120.0
"""Seconds for what happens in the background, on a machine that has other things to do."""


class Mirrored:
    """Machines with a store of their own each, and one mirror."""

    def __init__(self, directory: Path, s3: S3Server) -> None:
        self.directory = directory
        self._fleet = Fleet(directory)
        bucket = s3.fresh()
        self.mirror: Store = S3Store(bucket, directory / "scratch")
        self.command = self._fleet.command
        self.variables = {
            "CACHEMGR_MIRROR": str(bucket),
            "CACHEMGR_MIRROR_ENDPOINT": s3.endpoint,
            "CACHEMGR_MIRROR_REGION": "us-east-1",
            "CACHEMGR_TRUST": "mirror=off",
            "AWS_EC2_METADATA_DISABLED": "true",
            **s3.environ,
        }

    def machine(self, name: str, **variables: str) -> Machine:
        made = self._fleet.machine(name, **{**self.variables, **variables})
        return Machine(made.root, made.root / "store", made.variables)

    def arrived(self, count: int) -> list[str]:
        """The captures on the mirror, once there are so many."""
        end = time.monotonic() + PATIENCE
        while len(found := visible(self.mirror)) < count and time.monotonic() < end:
            time.sleep(0.1)
        assert len(found) == count
        return found


def layer_bytes(store: Store) -> int:
    """Of the layers that a store has."""
    return sum(entry.size for entry in store.scan(layout.LAYERS))


@pytest.fixture
def fleet(tmp_path: Path, s3: S3Server) -> Mirrored:
    return Mirrored(tmp_path, s3)


def test_what_one_machine_pushes_another_pulls_and_starts_warm(fleet: Mirrored) -> None:
    one, two = fleet.machine("one"), fleet.machine("two")
    cold = one.run(*fleet.command("f", "g"))
    plan = one.json("push", "--dry-run")
    assert (plan["moved"], plan["plan"]["objects"]) == (None, 2)
    assert visible(fleet.mirror) == []
    pushed = one.cachemgr("push")
    assert pushed.stderr.startswith("pushed 1 capture (2 objects, ")
    again = one.cachemgr("push", cold["key"][:12])
    assert again.stderr.startswith("skipped 2 objects (")
    pulled = two.json("pull")
    assert pulled["moved"]["captures"] == [cold["published"]]
    assert "pulled 0" not in two.cachemgr("pull").stderr
    warm = two.run(*fleet.command("f", "g"), CACHEMGR_OFFLINE="true")
    assert (warm["result"], warm["verdict"], warm["where"]) == ("exact", "used", "local")


def test_pull_takes_what_is_named_what_a_filter_finds_or_what_runs_here(fleet: Mirrored) -> None:
    one = fleet.machine("one")
    first = one.run(*fleet.command("f"))["key"]
    second = one.run(*fleet.command("g", "h"))["key"]
    newer = fleet.machine("one", **install_stand_in(fleet.directory, torch="2.14.0+cpu"))
    elsewhere = newer.run(*fleet.command("f"))["key"]
    one.cachemgr("push")
    for number, (words, expected) in enumerate(
        [
            (("pull", first), {first}),
            (("pull", "-f", "files=2"), {second}),
            (("pull", first, "-f", "files=2"), set()),
            (("pull",), {first, second}),
            (("pull", "--all"), {first, second, elsewhere}),
        ]
    ):
        machine = fleet.machine(f"reader-{number}")
        machine.cachemgr(*words)
        assert set(machine.cachemgr("ls", "-q").stdout.split()) == expected, words


def test_commands_about_a_store_can_be_about_the_mirror(fleet: Mirrored) -> None:
    one = fleet.machine("one")
    first = one.run(*fleet.command("f"))["key"]
    second = one.run(*fleet.command("g", "h"))["key"]
    one.cachemgr("push")
    two = fleet.machine("two")
    assert two.cachemgr("ls", "-q").stdout == ""
    assert set(two.cachemgr("ls", "--mirror", "-q").stdout.split()) == {first, second}
    assert two.cachemgr("ls", "--mirror", "-q", "-f", "files>1").stdout.split() == [second]
    assert two.json("show", first, "--mirror")["artifact"]["files"] == 1
    assert two.json("size", "--mirror")["size"]["artifacts"] == 2
    two.cachemgr("rm", "--mirror", "-y", first)
    assert two.cachemgr("ls", "--mirror", "-q").stdout.split() == [second]
    assert len(list(fleet.mirror.scan(layout.NEAR))) == 1
    assert set(one.cachemgr("ls", "-q").stdout.split()) == {first, second}
    assert "is nothing to filter by" in one.cachemgr("ls", "-f", "colour=red", code=2).stderr


def test_reindex_reads_the_store_and_the_mirror(fleet: Mirrored) -> None:
    one = fleet.machine("one")
    one.run(*fleet.command("f"), options=("--publish", "mirror"))
    fleet.arrived(1)
    one.run(*fleet.command("g"))

    def read(*words: str, **more: str) -> list[tuple[str, int]]:
        told = one.json("reindex", *words, code=int(more.pop("code", "0")), **more)
        return [(each["store"], each["artifacts"]) for each in told["stores"]]

    local, mirror = (str(one.store), 2), (str(fleet.mirror), 1)
    assert read() == [local, mirror]
    assert read("--local") == [local]
    assert read("--mirror") == [mirror]
    assert read(CACHEMGR_OFFLINE="true") == [local]
    nowhere = {"CACHEMGR_MIRROR_ENDPOINT": "http://127.0.0.1:1"}
    assert read(code="3", **nowhere) == [local]
    done = one.cachemgr("reindex", code=3, **nowhere)
    told, warned = done.stderr.splitlines()
    assert told == f"read 2 artifacts and 2 starts in {one.store}"
    assert warned.startswith("warning: ")
    assert str(fleet.mirror) in warned
    assert one.cachemgr("reindex", "--mirror", code=13, **nowhere).stderr.startswith("error: ")


def test_errors_of_a_transfer_are_sentences_with_their_exit_codes(fleet: Mirrored) -> None:
    one = fleet.machine("one")
    missing = one.cachemgr("pull", "k1:" + "0" * 32, code=10)
    assert "no artifact `k1:" in missing.stderr
    assert one.cachemgr("pull", "--all").stderr.startswith("nothing to pull from s3://")
    unset = one.cachemgr("push", code=2, CACHEMGR_MIRROR="")
    assert "no mirror is set" in unset.stderr
    one.run(*fleet.command("f"))
    denied = one.cachemgr("push", code=13, AWS_ACCESS_KEY_ID="reader", AWS_SECRET_ACCESS_KEY="reader-secret")
    assert "denied" in denied.stderr or "may not" in denied.stderr
    offline = one.cachemgr("push", code=2, CACHEMGR_OFFLINE="true")
    assert "hint:" in offline.stderr


def test_a_damaged_capture_stays_behind_and_the_rest_arrives(fleet: Mirrored) -> None:
    one = fleet.machine("one")
    one.run(*fleet.command("f"))
    one.run(*fleet.command("g"))
    layer = min((one.store / "layers").rglob("*.zst"))
    layer.write_bytes(layer.read_bytes()[:-1])
    partly = one.cachemgr("push", code=3)
    assert "has other bytes than its name says" in partly.stderr
    assert len(visible(fleet.mirror)) == 1


def test_a_launch_publishes_to_the_mirror_in_the_background(fleet: Mirrored) -> None:
    one = fleet.machine("one")
    report = one.run(*fleet.command("f", "g"), options=("--publish", "mirror"))
    assert fleet.arrived(1) == [report["published"]]
    assert report["published_bytes"] == layer_bytes(LocalStore(one.store))
    assert (report["pulled_bytes"], report["pushed_bytes"]) == (0, None), "a sender sends it, perhaps after the record"
    two = fleet.machine("two", CACHEMGR_PUBLISH="mirror")
    two.cachemgr("pull")
    assert two.run(*fleet.command("f", "g"))["verdict"] == "used"
    hurried = two.run(*fleet.command("h"), options=("--single-flight", "60"))
    assert hurried["pushed_bytes"] > hurried["published_bytes"] > 0, "others wait for it there, so it sent it itself"


def test_a_start_reads_through_to_the_mirror_and_the_next_one_needs_no_network(fleet: Mirrored) -> None:
    one, two = fleet.machine("one"), fleet.machine("two")
    cold = one.run(*fleet.command("f", "g"), options=("--publish", "mirror"))
    fleet.arrived(1)
    assert two.json("lookup", "--", *fleet.command("f", "g"))["where"] == "mirror"
    warm = two.run(*fleet.command("f", "g"))
    assert (warm["result"], warm["verdict"], warm["where"]) == ("exact", "used", "mirror")
    assert "from the mirror" in warm["stderr"]
    assert warm["errors"] == {}
    assert warm["pulled_bytes"] > layer_bytes(LocalStore(two.store)), "layers, and the manifest"
    assert (warm["published_bytes"], warm["pushed_bytes"]) == (0, 0)
    assert visible(LocalStore(two.store)) == [cold["published"]]
    (two.root / "again").mkdir()
    again = two.run(*fleet.command("f", "g"), TMPDIR=str(two.root / "again"), CACHEMGR_OFFLINE="true")
    assert (again["result"], again["verdict"], again["where"]) == ("exact", "used", "local")
    assert again["pulled_bytes"] == 0


def test_a_near_artifact_of_the_mirror_is_found_by_its_guards(fleet: Mirrored) -> None:
    fleet.machine("one").run(*fleet.command("f", "g"), options=("--publish", "mirror"))
    fleet.arrived(1)
    near = fleet.machine("two").run(*fleet.command("f", "h"))
    assert (near["result"], near["where"], near["verdict"]) == ("near", "mirror", "partly used")
    none = fleet.machine("three", **install_stand_in(fleet.directory, torch="2.14.0+cpu")).run(*fleet.command("f"))
    assert (none["result"], none["verdict"]) == ("none", "cold")


def test_what_may_not_be_written_is_restored_from_the_mirror_itself(fleet: Mirrored) -> None:
    fleet.machine("one").run(*fleet.command("f"), options=("--publish", "mirror"))
    fleet.arrived(1)
    two = fleet.machine("two")
    warm = two.run(*fleet.command("f"), options=("--read-only",))
    assert (warm["verdict"], warm["where"]) == ("used", "mirror")
    assert not two.store.exists()
    assert warm["pulled_bytes"] == layer_bytes(LocalStore(fleet.machine("one").store))


def test_a_missing_or_damaged_layer_of_the_mirror_is_a_cold_start_that_publishes_again(fleet: Mirrored) -> None:
    one = fleet.machine("one")
    one.run(*fleet.command("f"), options=("--publish", "mirror"))
    fleet.arrived(1)
    (layer,) = [entry.name for entry in fleet.mirror.scan("layers/")]
    data = fleet.mirror.read(layer, limit=1 << 20)
    fleet.mirror.delete(layer)
    absent = fleet.machine("two").run(*fleet.command("f"))
    assert (absent["verdict"], absent["errors"]["mirror absent"]) == ("cold", 1)
    fleet.mirror.put(layer, data[:-1] + b"x")
    damaged = fleet.machine("three").run(*fleet.command("f"))
    assert (damaged["verdict"], damaged["errors"]["mirror damaged"]) == ("cold", 1)
    assert damaged["published"] is not None
    assert any("has other bytes than its name says" in reason for reason in damaged["reasons"])
    assert fleet.machine("three").run(*fleet.command("f"))["verdict"] == "used"


def test_an_untrusted_mirror_is_not_read_and_both_ways_out_are_said(fleet: Mirrored) -> None:
    fleet.machine("one").run(*fleet.command("f"), options=("--publish", "mirror"))
    fleet.arrived(1)
    two = fleet.machine("two", CACHEMGR_TRUST="mirror=require")
    report = two.run(*fleet.command("f"))
    assert (report["result"], report["verdict"], report["errors"]) == ("none", "cold", {"levels ignored": 1})
    assert "no trusted key" in report["stderr"]
    assert "CACHEMGR_TRUST=mirror=off" in report["stderr"]
    assert "no trusted key" in two.cachemgr("pull", code=12).stderr


def test_what_was_taken_from_the_mirror_is_asked_what_the_mirror_is_asked(fleet: Mirrored) -> None:
    fleet.machine("one").run(*fleet.command("f"), options=("--publish", "mirror"))
    fleet.arrived(1)
    two = fleet.machine("two")
    assert two.run(*fleet.command("f"))["where"] == "mirror"
    (two.tmp / "elsewhere").mkdir()
    strict = two.run(*fleet.command("f"), TMPDIR=str(two.tmp / "elsewhere"), CACHEMGR_TRUST="mirror=require")
    assert strict["verdict"] == "cold", strict
    assert strict["errors"]["untrusted"] == 1


def test_what_a_pod_publishes_waits_for_a_signature_where_one_is_required(fleet: Mirrored) -> None:
    signer = fleet.machine("signer", CACHEMGR_TRUST="mirror=require")
    public = json.loads(signer.cachemgr("keygen", "key", "--json").stdout)["public"]
    trusting = {"CACHEMGR_TRUST": "mirror=require", "CACHEMGR_TRUSTED_KEYS": public}
    pod = fleet.machine("pod", **trusting)
    report = pod.run(*fleet.command("f", "g"), options=("--publish", "mirror"))
    waiting = Incoming(fleet.mirror)
    end = time.monotonic() + PATIENCE
    while not visible(waiting) and time.monotonic() < end:
        time.sleep(0.1)
    assert visible(waiting) == [report["published"]]
    assert visible(fleet.mirror) == []
    assert fleet.machine("early", **trusting).run(*fleet.command("f", "g"))["result"] == "none"
    key = report["key"]
    signer.cachemgr("sign", "--mirror", "--key", "key", "--accept-unverified-origin", key, CACHEMGR_TRUSTED_KEYS=public)
    assert (visible(waiting), visible(fleet.mirror)) == ([], [report["published"]])
    late = fleet.machine("late", **trusting)
    warm = late.run(*fleet.command("f", "g"))
    assert (warm["result"], warm["where"], warm["verdict"]) == ("exact", "mirror", "used")
    near = fleet.machine("other", **trusting).run(*fleet.command("f", "h"))
    assert (near["result"], near["where"]) == ("near", "mirror")
    assert late.cachemgr("push").stderr.startswith("skipped "), "the signature came along, so it goes where it was"
    assert visible(waiting) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"AWS_ACCESS_KEY_ID": "stranger", "AWS_SECRET_ACCESS_KEY": "stranger-secret"}, "denied"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "no credentials"),
        ({"CACHEMGR_MIRROR_ENDPOINT": "http://127.0.0.1:9"}, "unreachable"),
        ({"CACHEMGR_MIRROR_ENDPOINT": "http://no-such-host.invalid"}, "unresolved"),
    ],
)
def test_a_mirror_that_cannot_be_read_is_told_by_name_and_the_command_starts(
    fleet: Mirrored, changes: dict[str, str], word: str
) -> None:
    report = fleet.machine("one", **changes).run(*fleet.command("f"))
    assert (report["verdict"], report["exit_code"]) == ("cold", 0)
    assert report["errors"].get(f"mirror {word}") == 1, report["stderr"]
    assert "looking up in the mirror failed" in report["stderr"]
    assert report["published"] is not None


def test_captures_that_are_listed_and_may_not_be_read_are_no_miss(fleet: Mirrored, s3: S3Server) -> None:
    """As in a bucket whose key (KMS) a machine may not decrypt with."""
    fleet.machine("one").run(*fleet.command("f"), options=("--publish", "mirror"))
    fleet.arrived(1)
    with s3_faults.faulty(s3.endpoint) as server:
        server.fail("GET", s3_faults.error(403, "AccessDenied"))
        two = fleet.machine("two", CACHEMGR_MIRROR_ENDPOINT=server.endpoint)
        report = two.run(*fleet.command("f"))
    assert (report["result"], report["verdict"], report["errors"]) == ("none", "cold", {"unreadable": 1})
    assert re.search(r"starts cold · unreadable: cannot read .* access is denied \(AccessDenied\)", report["stderr"])
    assert "no artifact yet" not in report["stderr"]
    assert two.json("why")["why"]["word"] == "denied"


def test_what_could_not_be_sent_is_told_and_sent_by_the_next_command(fleet: Mirrored) -> None:
    one = fleet.machine("one", CACHEMGR_PUBLISH="mirror")
    one.run(*fleet.command("f"), AWS_ACCESS_KEY_ID="reader", AWS_SECRET_ACCESS_KEY="reader-secret")
    (outbox,) = (one.home / ".cache" / "cachemgr" / "outbox").iterdir()
    end = time.monotonic() + PATIENCE
    while not (outbox / "failure.json").exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert json.loads((outbox / "failure.json").read_text())["word"] == "denied"
    assert visible(fleet.mirror) == []
    later = one.run(*fleet.command("g"))
    assert later["errors"]["mirror denied"] == 1
    assert "1 capture waits for the mirror since" in later["stderr"]
    fleet.arrived(2)


def test_a_sender_does_not_keep_the_command_or_its_readers_waiting(fleet: Mirrored) -> None:
    """The server of this mirror takes the connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        silence = {"CACHEMGR_MIRROR_ENDPOINT": endpoint, "CACHEMGR_DEADLINE": "3"}
        one = fleet.machine("one", CACHEMGR_PUBLISH="mirror", **silence)
        process = one.start("run", "--", sys.executable, "-c", "print('done')")
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out) == (0, "done\n"), err


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare on this machine")
def test_the_first_process_of_a_container_waits_for_what_it_sends(fleet: Mirrored) -> None:
    """Nothing outlives it: its end takes every process along."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us make a PID namespace")
    one = fleet.machine("one", CACHEMGR_PUBLISH="mirror", CACHEMGR_DEADLINE="100")
    done = subprocess.run(
        [*unshare, sys.executable, "-m", "cachemgr", "run", "--", *fleet.command("f")],
        env=one.environ,
        cwd=one.root,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE * 2,
    )
    assert done.returncode == 0, done.stderr
    assert len(visible(fleet.mirror)) == 1, done.stderr
