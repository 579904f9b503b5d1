"""What launch records add up to."""

import msgspec

from cachemgr.capture import Launch
from cachemgr.history import History, fold
from cachemgr.key import Key
from tests.test_capture import LAUNCH

KEY = Key("k1:" + "1" * 32)
COLD = {"run": 60.0, "init_engine": 45.0}


def launch(**changes: object) -> Launch:
    usual: dict[str, object] = {"artifact": KEY, "result": "exact", "verdict": "used", "restore_seconds": 0.5}
    return msgspec.structs.replace(LAUNCH, **(usual | changes))


def test_uses_verdicts_and_last_use_are_those_of_launches_that_took_from_it() -> None:
    histories = fold(
        [
            launch(started="2026-03-01T00:00:00Z"),
            launch(started="2026-01-01T00:00:00Z", verdict="inert"),
            launch(started="2026-02-01T00:00:00Z", result="near", verdict="partly used"),
            launch(started="2026-09-01T00:00:00Z", result="none"),
            launch(started="2026-09-01T00:00:00Z", artifact=None),
            launch(started="2025-01-01T00:00:00Z", artifact=Key("k1:" + "2" * 32)),
        ]
    )
    assert len(histories) == 2
    assert histories[KEY].uses == 3
    assert histories[KEY].last_used == "2026-03-01T00:00:00Z"
    assert histories[KEY].verdicts == {"used": 1, "inert": 1, "partly used": 1}


def test_seconds_saved_are_those_of_the_same_phase_with_the_restore_paid_for() -> None:
    engine = {"engine": "vllm", "phases": {"run": 90_000.0, "init_engine": 12.0}, "exit_code": 137}
    history = fold([launch(**engine), launch(**engine, verdict="partly used"), launch(**engine, verdict="inert")])[KEY]
    assert history.saved_seconds(COLD) == 2 * 45.0 - 2 * 12.5, "a server runs for as long as it is wanted"
    assert history.saved_seconds({"run": 60.0}) is None
    program = {"engine": "torch", "phases": {"run": 20.0}}
    history = fold([launch(**program), launch(**program, exit_code=1), launch(**program, exit_code=None)])[KEY]
    assert history.saved_seconds(COLD) == 60.0 - 20.5
    assert history.warm_seconds == 20.0
    slower = fold([launch(engine="torch", phases={"run": 70.0})])[KEY]
    assert slower.saved_seconds(COLD) == 60.0 - 70.5, "what costs more than it saves says so"
    assert History().saved_seconds(COLD) is None
