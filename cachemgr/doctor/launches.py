"""Checks of what launches on this host tell: that they can be told anything, what they swallowed, what was not sent."""

import os
import secrets
import socket
from collections import Counter
from collections.abc import Iterator

from cachemgr.clock import written
from cachemgr.desk import peer
from cachemgr.doctor.finding import Finding, Opened, Patient, note, ok, warning
from cachemgr.outbox import reports as reports_for
from cachemgr.store import records

_DAYS = 7
_SECONDS = 2.0


def desk(_patient: Patient, _opened: Opened) -> Iterator[Finding]:
    """Processes of an engine tell their launch what they look up by a socket (`cachemgr.desk`), which some sandboxes
    do not have."""
    name = f"\0cachemgr-doctor-{secrets.token_hex(16)}"
    try:
        user = _user_who_says(name)
    except OSError as failure:
        said = f"no Unix sockets for messages ({failure.strerror or failure}): engines cannot ask for single entries"
        yield warning("desk", said, "allow AF_UNIX sockets of type SOCK_SEQPACKET in the sandbox of this container")
        return
    if user == os.geteuid():
        yield ok("desk", "processes of an engine can tell their launch what they look up")
    else:
        said = f"a message of this user comes from user id {user}, so that no launch listens to its engine"
        yield warning("desk", said, "run launch and engine in one user namespace")


def _user_who_says(name: str) -> int:
    """Tell ourselves something; who said so by the kernel. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen(1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
            one.settimeout(_SECONDS)
            listener.settimeout(_SECONDS)
            one.connect(name)
            other, _name = listener.accept()
            with other:
                other.settimeout(_SECONDS)
                one.send(b"{}")
                if other.recv(16) != b"{}":
                    raise OSError("a message is lost")
                return peer(other)[1]


def recent(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """What the last launches on this host swallowed so that their engines start."""
    begin = written(patient.now - _DAYS * 86400)
    told = records.launches(opened.cache.store, begin=begin[:10])
    own = [launch for launch in told if launch.host == patient.host and launch.started >= begin]
    failed = sorted((launch for launch in own if launch.errors), key=lambda launch: (launch.started, launch.launch))
    if failed:
        errors = Counter[str]()
        for launch in failed:
            errors.update(launch.errors)
        counted = ", ".join(f"{name} {count}" for name, count in sorted(errors.items()))
        said = f"{len(failed)} of {len(own)} on this host in {_DAYS} days swallowed errors: {counted}"
        yield warning("launches", said, f"cachemgr why --launch {failed[-1].launch}")
    elif own:
        yield ok("launches", f"{len(own)} on this host in {_DAYS} days, without errors")


def waiting(_patient: Patient, opened: Opened) -> Iterator[Finding]:
    """What launches left to be sent to the mirror and the service, and why it was not."""
    outbox, server = opened.cache.outbox, opened.settings.server
    waits = None if outbox is None else outbox.told()
    if outbox is not None and waits is not None:
        trouble = outbox.trouble()
        if trouble is not None:
            yield warning("sending", f"{waits} since {trouble.since}: {trouble.reason}", "cachemgr push")
        else:
            yield note("sending", f"{waits}; the next launch that publishes sends them", "cachemgr push")
    reports = () if server is None else records.kept(reports_for(opened.cache.home, server))
    if server is not None and reports:
        log = reports_for(opened.cache.home, server).with_suffix(".log")
        many = "1 report of a launch waits" if len(reports) == 1 else f"{len(reports)} reports of launches wait"
        yield warning("sending", f"{many} for {server}; the next launch sends them", f"cat {log}")
