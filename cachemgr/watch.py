"""Watching a launch: what its command has used and added so far, and whether it has come to rest."""

import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from cachemgr import digest, layer, observe
from cachemgr.capture import Verdict
from cachemgr.digest import Digest
from cachemgr.domains import Target
from cachemgr.domains.relocation import CannotTravelError
from cachemgr.examine import Tree, seen_in


class Pace(msgspec.Struct, frozen=True):
    """How soon a running command is taken to rest; in seconds."""

    look: float
    """Between two looks at its directories."""
    quiet: float
    """After a ready sign, how long nothing may change before a capture is made."""
    rest: float
    """The same without a ready sign: compiling one graph can take a while in which no file appears."""


CALM = Pace(look=5.0, quiet=10.0, rest=60.0)
HURRIED = Pace(look=1.0, quiet=2.0, rest=60.0)
"""Where other machines wait for the capture. What comes after it is captured at the end."""


class Work(msgspec.Struct, frozen=True):
    """What a command has done to its live directories."""

    trees: tuple[Tree, ...]
    added: dict[str, int]
    """Per domain, files that travel and are new or changed."""
    verdict: Verdict
    examples: tuple[str, ...] = ()
    """The path of one such file per domain that has any, below the domain's name."""

    @property
    def grown(self) -> int:
        return sum(self.added.values())

    def units(self) -> dict[str, frozenset[str]]:
        """The units by domain that the command used or made."""
        return {tree.domain.name: frozenset(tree.domain.unit_of(path) for path in tree.touched) for tree in self.trees}


class Watch:
    """The live directories of one command, against what lay in them when it started.

    A start on a near artifact uses only some of what it was offered, and captures just that. Inductor's bundles list a
    kernel's directory and, finding it full, keep their own copy without reading it (torch 2.11-2.13
    `_inductor/triton_bundler.py`): a unit whose directory was listed counts as used for the capture, though not as
    proof for the verdict.

    An engine that loads an entry may write parts of it out again, byte for byte (vLLM 0.26-0.31 unpacks its artifacts
    into Inductor's directory at every start): files with the bytes that were offered are not added. Nor is a winner of
    tuning that is another one than was offered (`Domain.chooses`): a kernel that was compiled for it shows by itself.

    Other launches restore and compile into directories that all share: `elsewhere` says which units among files that
    are new are theirs.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        offered: Mapping[str, frozenset[str]],
        digests: Mapping[str, Mapping[str, Digest]],
        elsewhere: Callable[[Target, observe.Snapshot], frozenset[str]] = lambda _target, _new: frozenset(),
    ) -> None:
        self._targets = targets
        self._offered = dict(offered)
        self._digests = {domain: dict(files) for domain, files in digests.items()}
        self._lock = threading.Lock()
        self._elsewhere = elsewhere
        self._same: dict[tuple[str, str, observe.Seen], bool] = {}
        self._before = [observe.forget_reads(target.directory, seen_in(target)) for target in targets]
        self._since = [self._now_at(at) for at in range(len(targets))]
        self._folders = [
            {target.domain.unit_of(path) for path in offered.get(target.domain.name, ()) if "/" in path}
            for target in targets
        ]
        self._listed: list[set[str]] = [set() for _target in targets]
        self._foreign: dict[str, frozenset[str]] = {}
        self._there = [{target.domain.unit_of(path) for path in self._before[at]} for at, target in enumerate(targets)]
        self._forget_listings()

    def offer(self, offered: Mapping[str, frozenset[str]], digests: Mapping[str, Mapping[str, Digest]]) -> None:
        """These files were put there while the command ran, because it asked for them."""
        with self._lock:
            for index, target in enumerate(self._targets):
                paths = offered.get(target.domain.name, frozenset())
                if paths:
                    self._offer(index, target, paths)
                    self._digests.setdefault(target.domain.name, {}).update(digests.get(target.domain.name, {}))

    def _offer(self, index: int, target: Target, paths: frozenset[str]) -> None:
        units = {target.domain.unit_of(path) for path in paths}
        before, now = self._before[index], seen_in(target)
        fresh = {path: now[path] for path in paths if path in now and path not in before}
        self._before[index] = {**before, **observe.forget_reads(target.directory, fresh)}
        self._since[index] = self._now_at(index)
        self._offered[target.domain.name] = self._offered.get(target.domain.name, frozenset()) | paths
        self._there[index] |= units
        self._folders[index] |= {target.domain.unit_of(path) for path in paths if "/" in path}

    def _now_at(self, index: int) -> int:
        return observe.time_in(self._targets[index].directory) if self._before[index] else 0

    def leave_out(self, units: Mapping[str, frozenset[str]]) -> None:
        """These units (by domain) appear or appeared without the command's doing."""
        for domain, names in units.items():
            self._foreign[domain] = self._foreign.get(domain, frozenset()) | names

    def _forget_listings(self) -> None:
        for target, folders in zip(self._targets, self._folders, strict=True):
            observe.forget_listings(target.directory, folders)

    def work(self, *, settled_since: "Work | None" = None) -> Work:
        """What has been done so far.

        `settled_since` is an earlier look: units that changed since then are left out, because somebody writes them.
        """
        with self._lock:
            return self._work(settled_since)

    def _work(self, settled_since: "Work | None") -> Work:
        trees: list[Tree] = []
        added: dict[str, int] = {}
        examples: list[str] = []
        offered = read = 0
        known, forgotten = True, False
        for index, target in enumerate(self._targets):
            self._listed[index] |= observe.listed(target.directory, self._folders[index])
            before, after = self._before[index], self._scan(target, self._there[index])
            kept = not before or observe.keeps_access_times(target.directory)
            growth = observe.growth(before, after, access_times=kept)
            again = frozenset(path for path in growth.added if self._is_again(target, path, after))
            growth = msgspec.structs.replace(growth, added=growth.added - again)
            ours = self._offered.get(target.domain.name, frozenset())
            added[target.domain.name] = len(growth.added)
            examples += [f"{target.domain.name}/{min(growth.added)}"] if growth.added else []
            offered += len(ours)
            read += len(ours & (growth.read or frozenset()))
            known = known and growth.read is not None
            if growth.read is not None and self._is_forgotten(index, (ours & after.keys()) - growth.read):
                growth, forgotten = msgspec.structs.replace(growth, read=None), True
            touched = _touched(target, growth, after) | _inside(target, after, self._listed[index])
            tree = Tree(target.domain, target.directory, after, touched)
            trees.append(tree if settled_since is None else _settled(tree, settled_since.trees[index]))
        self._forget_listings()
        said = observe.verdict(offered, read if known and (read or not forgotten) else None, sum(added.values()))
        return Work(tuple(trees), added, said, tuple(examples))

    def _is_forgotten(self, index: int, unread: frozenset[str]) -> bool:
        """Whether that these files were not read may only look so: where launches share them, each that starts forgets
        the reads of those before."""
        return observe.were_forgotten(self._targets[index].directory, unread, self._since[index])

    def _is_again(self, target: Target, path: str, after: observe.Snapshot) -> bool:
        """Whether a file that was written has the bytes that were offered under its name, or is another choice."""
        wanted = self._digests.get(target.domain.name, {}).get(path)
        if wanted is None:
            return False
        known = (target.domain.name, path, after[path]._replace(atime_ns=0))
        if known not in self._same:
            stored = _stored_digest(target, path, after)
            self._same[known] = stored == wanted or (stored is not None and target.domain.chooses(path))
        return self._same[known]

    def _scan(self, target: Target, there: set[str]) -> observe.Snapshot:
        seen = seen_in(target)
        foreign = self._foreign.get(target.domain.name, frozenset())
        if target.domain.in_place:
            new = {path: look for path, look in seen.items() if target.domain.unit_of(path) not in there}
            foreign |= self._elsewhere(target, new)
        if not foreign:
            return seen
        return {path: look for path, look in seen.items() if target.domain.unit_of(path) not in foreign}


def _stored_digest(target: Target, path: str, after: observe.Snapshot) -> Digest | None:
    """The digest that a live file would be stored under."""
    relocation = target.domain.relocation_of(path)
    running = digest.hasher()
    try:
        pieces = layer.read_file(f"{target.directory}/{path}")
        if relocation is not None:
            folder = path.rpartition("/")[0]
            siblings = {other.rpartition("/")[2] for other in after if other.rpartition("/")[0] == folder}
            pieces = iter((relocation.detach(b"".join(pieces), siblings),))
        for piece in pieces:
            running.update(piece)
    except (OSError, CannotTravelError):
        return None
    return digest.finish(running)


def _touched(target: Target, growth: observe.Growth, after: observe.Snapshot) -> frozenset[str]:
    """Without access times, everything in a directory of ours counts as used: better a unit too many than a start that
    compiles it again. A directory of the user's may hold the caches of many programs, so there only what is new."""
    if growth.read is None:
        return frozenset(after) if target.ours else growth.added
    return growth.added | growth.read


def _inside(target: Target, after: observe.Snapshot, units: set[str]) -> frozenset[str]:
    return frozenset(path for path in after if target.domain.unit_of(path) in units) if units else frozenset()


def _settled(tree: Tree, earlier: Tree) -> Tree:
    """Without the units in which a file appeared, vanished or changed since `earlier`."""
    paths = tree.seen.keys() | earlier.seen.keys()
    moving = {tree.domain.unit_of(path) for path in paths if not _same(tree.seen.get(path), earlier.seen.get(path))}
    kept = {path: seen for path, seen in tree.seen.items() if tree.domain.unit_of(path) not in moving}
    return msgspec.structs.replace(tree, seen=kept)


def _same(now: observe.Seen | None, then: observe.Seen | None) -> bool:
    return now is not None and then is not None and now.same_bytes(then)


class Rest:
    """Decides when a running command has come to rest: ready and quiet, or at least quiet for long."""

    def __init__(self, watch: Watch, pace: Callable[[], Pace]) -> None:
        self._watch, self._pace = watch, pace
        self._looked = 0.0
        self._changed = 0.0
        self._last: Work | None = None

    def reached(self, now: float, *, ready: bool) -> Work | None:
        """The work of a command that rests, else None. `now` in monotonic seconds; asked about once a second."""
        pace = self._pace()
        if now - self._looked < pace.look:
            return None
        self._looked = now
        work = self._watch.work()
        if self._last is None or any(
            not _unchanged(tree, last) for tree, last in zip(work.trees, self._last.trees, strict=True)
        ):
            self._changed = now
        self._last = work
        wanted = pace.quiet if ready else pace.rest
        rests = now - self._changed >= wanted and (ready or work.grown > 0)
        return work if rests else None


def _unchanged(tree: Tree, last: Tree) -> bool:
    return tree.seen.keys() == last.seen.keys() and all(
        _same(seen, last.seen.get(path)) for path, seen in tree.seen.items()
    )
