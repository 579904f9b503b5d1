"""Those who sign: a key of a test, what it writes and what it forges."""

from dataclasses import dataclass, field
from pathlib import Path

from cachemgr.clock import written
from cachemgr.digest import Digest
from cachemgr.key import Key
from cachemgr.signature import Signer, new_private_key
from cachemgr.store import Store, layout
from cachemgr.store.captures import listing


@dataclass(frozen=True)
class Authority:
    """Somebody with a private key."""

    pem: bytes = field(default_factory=new_private_key, repr=False)

    @property
    def signer(self) -> Signer:
        return Signer(self.pem, where="a test")

    @property
    def id(self) -> str:
        return self.signer.public.id

    @property
    def public(self) -> str:
        return str(self.signer.public)

    def file(self, directory: Path, name: str = "signing.pem") -> Path:
        """The private key in a file as `keygen` makes it."""
        path = directory / name
        path.touch(0o600)
        path.write_bytes(self.pem)
        return path

    def sign_all(self, store: Store, now: float, expires: float | None = None) -> int:
        """Sign whatever lies in a store, without a look at it."""
        found = listing(store)
        for name, (key, _beside) in found.items():
            capture = layout.capture_of(name)
            assert capture is not None
            self.put(store, key, capture, now, expires)
        return len(found)

    def put(self, store: Store, key: Key, capture: Digest, now: float, expires: float | None = None) -> str:
        """Put the signature of a capture beside it, as the only one of this signer; its object name."""
        until = None if expires is None else written(expires)
        for entry in list(store.scan(layout.artifact_prefix(key))):
            if layout.signer_of(entry.name) == self.id and layout.beside(entry.name) == capture:
                store.delete(entry.name)
        name = layout.signature_name(key, capture, self.id, written(now))
        store.put(name, self.signer.sign(capture, key, signed=written(now), expires=until))
        return name
