"""What every command that measures sends to the experiment tracker when it is done."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from selfspec_cli.commands.screen import note
from selfspec_cli.config.schema import RunConfig, TrackerKind
from selfspec_cli.early_exit.errors import on_one_line
from selfspec_cli.record import folder as results
from selfspec_cli.record import quality, tables
from selfspec_cli.record.columns import Record, known
from selfspec_cli.record.tracking import Tracker, open_tracker


@contextmanager
def tracked(command: str, cfg: RunConfig, run_id: str | None = None) -> Iterator[Tracker]:
    """The tracker of `cfg` for as long as a command measures. In the end its messages are shown.

    If the command has not sent a report of its own, the tracker gets the table and the figures of the results folder. A
    failure of the tracker is one of the messages.

    Raises:
        ConfigError: the tracker that is asked for is not installed.
    """
    with open_tracker(cfg, run_id or results.new_run_id()) as tracker:
        yield tracker
        if cfg.tracker.kind is not TrackerKind.none and not tracker.reported:
            send(tracker, command, Path(cfg.results_dir))
    for message in tracker.messages:
        note(message)


def send(tracker: Tracker, command: str, folder: Path, rows: list[Record] | None = None) -> None:
    """Log rows (all of a results folder, if they are not given) and the figures of the folder."""
    from selfspec_cli.report import make

    try:
        with TemporaryDirectory() as place:
            shown = rows_of(folder) if rows is None else rows
            tracker.report(command, folder, shown, make.pictures(folder, place))
    except Exception as error:  # what was measured is on disk: what a tracker cannot do must not hide it
        tracker.messages.append(f"tracker: {on_one_line(error)}")


def rows_of(folder: str | Path) -> list[Record]:
    """The rows of a results folder, and one for each arm of which only its quality is known."""
    points, book = results.read(folder)[0], quality.read(folder)
    measured = {point.arm_key for point in points}
    alone = {finding.arm_key: finding for finding in book.findings.values() if finding.arm_key not in measured}
    rows = [
        replace(
            tables.of_arm(one.arm), run_id=one.run_id, time=one.time, device=one.device, **known(book.columns(key, ""))
        )
        for key, one in alone.items()
    ]
    return [tables.row(point) for point in points] + [tables.with_delta(row) for row in rows]
