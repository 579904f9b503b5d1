"""Blame: what an engine's end says about the files that were restored."""

import signal

import pytest

from cachemgr import observed
from cachemgr.blame import blamed
from cachemgr.child import Ended
from cachemgr.engine_log import EngineLog
from cachemgr.seen import Seen

DIRECTORY = "/root/.cache/vllm/torch_compile_cache"
KERNEL = "torch_aot_compile/ab/inductor_cache/cd/ccode.py"
RESTORED = {DIRECTORY: {KERNEL}}
READY = "INFO:     Application startup complete.\n"


def traceback(*last: str) -> str:
    return "\n".join(
        ["Traceback (most recent call last):", f'  File "{DIRECTORY}/{KERNEL}", line 7, in call', *last, "", ""]
    )


FAILED = traceback("RuntimeError: CUDA error: an illegal memory access was encountered")
UNREADABLE = traceback(f"OSError: {DIRECTORY}/{KERNEL}: invalid ELF header")


def seen(*pieces: str) -> Seen:
    log = EngineLog(0.0)
    for at, piece in enumerate(pieces):
        log.feed(piece.encode(), float(at))
    log.close(float(len(pieces)))
    return log.seen()


def blame_of(*pieces: str, code: int = 1, number: int | None = None) -> str | None:
    return blamed(observed.death(Ended(code, number, left_behind=False), seen(*pieces)), RESTORED)


def test_a_traceback_through_restored_code_is_proof_while_an_engine_starts() -> None:
    assert "illegal memory access" in (blame_of(FAILED) or "")


def test_compiled_code_is_in_the_frames_of_whatever_fails_while_an_engine_serves() -> None:
    assert blame_of(READY, FAILED) is None


def test_an_exception_that_names_a_restored_file_is_proof_at_any_time() -> None:
    assert "invalid ELF header" in (blame_of(READY, UNREADABLE) or "")


def test_what_an_engine_survived_it_did_not_die_of() -> None:
    assert blame_of(UNREADABLE, READY) is None


def test_an_interrupt_is_nobodys_fault() -> None:
    assert blame_of(traceback("KeyboardInterrupt"), code=130) is None
    assert blame_of(traceback("KeyboardInterrupt: terminated"), code=1) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP])
def test_who_was_told_to_end_did_not_die_of_a_file(number: signal.Signals) -> None:
    assert blame_of(FAILED, code=128 + number, number=number) is None


def test_bad_machine_code_is_blamed_only_while_an_engine_starts() -> None:
    assert blame_of(code=128 + signal.SIGILL, number=signal.SIGILL) is not None
    assert blame_of(READY, code=128 + signal.SIGILL, number=signal.SIGILL) is None


def test_running_out_of_memory_is_not_the_fault_of_a_file() -> None:
    assert blame_of(FAILED + "torch.OutOfMemoryError: CUDA out of memory.\n") is None
