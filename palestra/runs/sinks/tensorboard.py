"""TensorBoard sink: event files, written with the tensorboard package alone, without torch or TensorFlow."""

from __future__ import annotations

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from palestra.core.files import read_bytes
from palestra.runs.sinks.base import Metrics, Sink, TensorBoardConfig


class TensorBoardSink(Sink):
    """Writes scalars and the config as text. A resumed run marks earlier events of repeated steps as obsolete."""

    def __init__(self, config: TensorBoardConfig, run: Path, folder: Path) -> None:
        self.folder = Path(config.folder or folder)
        began = not list(self.folder.glob("events.out.tfevents.*"))
        self.writer = EventFileWriter(str(self.folder))
        self.is_first_write = True
        if began:
            self._add(0, Summary(value=[_text("config", f"```yaml\n{read_bytes(run / 'config.yaml').decode()}\n```")]))

    def write(self, step: int, metrics: Metrics) -> None:
        trained = not any(name.startswith(("time/", "eval/")) for name in metrics)
        if self.is_first_write and trained:  # TensorBoard drops events of an earlier process from this step on
            restart = Event(step=step, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
            self.writer.add_event(restart)
            self.is_first_write = False
        self._add(step, Summary(value=[Summary.Value(tag=name, simple_value=x) for name, x in metrics.items()]))

    def _add(self, step: int, summary: Summary) -> None:
        self.writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def _text(name: str, markdown: str) -> Summary.Value:
    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(
        tag=f"{name}/text_summary", metadata=kind, tensor=TensorProto(dtype=DT_STRING, string_val=[markdown.encode()])
    )
