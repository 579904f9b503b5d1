"""Secrets in names and texts: what nobody should read in a store, a report or a log.

A secret is known by the name that it is given to, by where it stands in a URL or a header, or by its shape. One that
has none of these, such as a bare word of a program's arguments, cannot be told from any other word.
"""

import json
import re

HIDDEN = "***"

_SECRET = re.compile(
    r"TOKEN(_|$)|SECRET|PASSW(OR)?D|PASSPHRASE|API_?KEY|CREDENTIAL|ACCESS_?KEY|PRIVATE_?KEY|AUTH(_|$)|AUTHORIZATION|BEARER"
    r"|COOKIE",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_HEADER = re.compile(r"(?i)\b(authorization\s*[:=]\s*(?:[a-z]+\s+)?|bearer\s+)[A-Za-z0-9._~+/=-]{4,}")
# A word is looked at from its beginning only. A blank is between a name and its value where the name is an option, as
# in the text of `sh -c`.
_NAME = re.compile(r"(?<![\w.-])(?:([\w.-]+)[\"']?\s*[=:]\s*|(--[A-Za-z][\w.-]*)\s+)")
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s&;,\"']+")
_SIGNED = re.compile(r"(?i)([?&](?:x-amz-[a-z-]+|x-goog-[a-z-]+|awsaccesskeyid|signature|sig|key|code)=)[^&\s#\"']+")
"""Queries of signed URLs (AWS Signature Version 4, Google Cloud Storage V4, Azure SAS) and of API gateways."""
_SHAPED = re.compile(
    r"\b(hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|eyJ[\w-]{8,}\.eyJ)[A-Za-z0-9_.-]{12,}",
)
"""Tokens of Hugging Face, OpenAI, GitHub, GitLab, Slack and AWS, and JSON Web Tokens, by how they begin."""
_MAX_DEPTH = 20


def is_secret(name: str) -> bool:
    """Whether a variable or option of this name may hold a secret."""
    return _SECRET.search(name.replace("-", "_")) is not None


def without_secrets(text: str) -> str:
    """`text` with a mark for every secret that can be recognised in it; JSON is looked into."""
    name, equals, value = text.partition("=")
    for before, inner in (("", text), (name + equals, value)):
        if inner.lstrip()[:1] in ("{", "["):
            cleaned = _json(inner)
            if cleaned is not None:
                return before + cleaned
    return _plain(text)


def _plain(text: str) -> str:
    text = _LOGIN.sub(f"{HIDDEN}@", text)
    text = _SIGNED.sub(lambda found: found[1] + HIDDEN, text)
    text = _HEADER.sub(lambda found: found[1] + HIDDEN, text)
    return _SHAPED.sub(lambda found: found[1] + HIDDEN, _unnamed(text))


def _unnamed(text: str) -> str:
    """Without what is given to a name that hides secrets, `name=value`, `name: value` or `--name value`."""
    pieces, at = [], 0
    for found in _NAME.finditer(text):
        value = _VALUE.match(text, found.end()) if is_secret(found[1] or found[2]) else None
        if value is not None and found.start() >= at and not value[0].startswith((HIDDEN, "-")):
            pieces += [text[at : value.start()], HIDDEN]
            at = value.end()
    return "".join([*pieces, text[at:]])


def _json(text: str) -> str | None:
    """JSON without secrets, in the very letters where there are none; None for what is no JSON."""
    try:
        value = json.loads(text)
        cleaned = _value(value, secret=False, depth=0)
    except (ValueError, RecursionError):
        return None
    return text if cleaned == value else json.dumps(cleaned, ensure_ascii=False)


def _value(value: object, *, secret: bool, depth: int) -> object:
    if depth > _MAX_DEPTH:
        return HIDDEN
    if isinstance(value, dict):
        return {
            name: _value(held, secret=secret or is_secret(str(name)), depth=depth + 1) for name, held in value.items()
        }
    if isinstance(value, list):
        return [_value(held, secret=secret, depth=depth + 1) for held in value]
    if isinstance(value, str):
        return HIDDEN if secret and value else _plain(value)
    return value
