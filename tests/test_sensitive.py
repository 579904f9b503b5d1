"""Secrets in texts: what is recognised, and what is left alone because it is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.sensitive import HIDDEN, without_secrets

HELD = {
    "a login in a URL": "postgres://user:PASS@db/x",
    "a user in a URL": "s3://PASS@bucket/x",
    "a signed URL": "https://h/x?X-Amz-Credential=PASS&X-Amz-Signature=PASS&a=1",
    "a token in a query": "https://h/x?a=1&access_token=PASS#frag",
    "a shared access signature": "https://h/x?sv=1&sig=PASS",
    "a header": "Authorization: Bearer PASSPASS",
    "a header without a scheme": "Authorization: PASSPASS",
    "another scheme": "authorization: basic PASSPASS",
    "a bearer": "use bearer PASSPASS here",
    "an assignment": "DB_PASSWORD=PASS",
    "a quoted assignment": "API_KEY='PASS PASS' next",
    "a colon": "api_key: PASS",
    "an option in a text": "cd / && vllm serve m --api-key PASS --port 1",
    "a quoted value of an option": "serve --hf-token 'PASS PASS' next",
    "JSON": '{"password": "PASS"}',
    "deep JSON": '{"a": [{"auth_token": "PASS"}], "b": {"secret": {"c": ["PASS"]}}}',
    "JSON behind an option": '--x={"api_key": "PASS"}',
    "what is almost JSON": '{"api_key": "PASS", }',
    "a URL in JSON": '{"url": "redis://:PASS@h"}',
    "a token of Hugging Face": "hf_PASSabcdefghijklmnop",
    "a token of GitHub": "x ghp_PASSabcdefghijklmnop y",
    "a web token": "eyJhbGciOiJIUzI1NiJ9.eyJPASSabcdefghijkl.PASSx",
}
PLAIN = [
    "", "--port=8000", "a:b", "http://host:8000/x?a=1&rev=2", "file.py", "--max-tokens=5", "tokens=3", "k=v", "C:/x",
    '{"a": 1,"b":[ 2 ]}', '{"a": "x"', "[1, 2]", "sk-1", "hf_short", "meta-llama/Llama-3.1-8B", "author=me", "{}", "=",
    "token", "bearer", "serve --api-key --port 1", "--max-tokens 5 --port 1",
    "https://h/path@v1/x", '{"token_ids": [1, 2]}',
]  # fmt: skip


@pytest.mark.parametrize("text", HELD.values(), ids=HELD.keys())
def test_a_secret_is_hidden_and_what_stands_around_it_is_not(text: str) -> None:
    hidden = without_secrets(text)
    assert "PASS" not in hidden.replace("DB_PASSWORD", "")
    assert HIDDEN in hidden
    assert hidden[:2] == text[:2]


@pytest.mark.parametrize("word", ["a", "a.", "key-", "A_"])
def test_a_word_of_the_longest_kind_is_looked_at_once(word: str) -> None:
    text = word * (131_000 // len(word))
    assert without_secrets(text) == text, "or this test would not end"


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_secret_stays_to_the_letter(text: str) -> None:
    assert without_secrets(text) == text


@given(st.text() | st.lists(st.sampled_from([*HELD.values(), *PLAIN])).map(" ".join))
def test_what_is_hidden_once_stays_as_it_is(text: str) -> None:
    hidden = without_secrets(text)
    assert without_secrets(hidden) == hidden
