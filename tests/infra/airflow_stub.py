"""A stand-in for Airflow, and the DAG loaded with it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from tests.infra.manifests import INFRA


class Recorder:
    """Stands for Airflow: notes how its decorators were called, and runs a task when told to."""

    def __init__(self) -> None:
        self.dag: dict[str, Any] = {}
        self.task: dict[str, Any] = {}
        self.run: Callable[..., None] | None = None

    def modules(self) -> dict[str, types.ModuleType]:
        root, decorators, exceptions = (
            types.ModuleType(n) for n in ("airflow", "airflow.decorators", "airflow.exceptions")
        )

        def dag(**given: Any) -> Any:
            self.dag = given
            return lambda function: function

        def task(**given: Any) -> Any:
            self.task = given

            def decorated(function: Callable[..., None]) -> Callable[[], None]:
                def called() -> None:
                    self.run = function

                return called

            return decorated

        class AirflowException(Exception):
            pass

        class AirflowFailException(AirflowException):
            pass

        for module, names in (
            (decorators, {"dag": dag, "task": task}),
            (exceptions, {"AirflowException": AirflowException, "AirflowFailException": AirflowFailException}),
        ):
            vars(module).update(names)
        return {module.__name__: module for module in (root, decorators, exceptions)}


def load_dag(recorder: Recorder) -> Any:
    path = INFRA / "airflow_dag.py"
    module = types.ModuleType("airflow_dag")
    known = {name: sys.modules.get(name) for name in recorder.modules()}
    sys.modules.update(recorder.modules())
    try:
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
    finally:
        for name, before in known.items():
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before
    return module
