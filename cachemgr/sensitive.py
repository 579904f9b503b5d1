"""Names of variables and options whose values nobody should read in a store, a report or a log."""

import re

_SECRET = re.compile(
    r"TOKEN(_|$)|SECRET|PASSW(OR)?D|PASSPHRASE|API_?KEY|CREDENTIAL|ACCESS_?KEY|PRIVATE_?KEY|AUTH(_|$)|BEARER",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a variable or option of this name may hold a secret."""
    return _SECRET.search(name.replace("-", "_")) is not None
