"""The options of reports: `report.*`."""

from __future__ import annotations

from dataclasses import dataclass

from specextend.decoding.decoding_options import at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """`report.*`: What reports and dry runs know about the run's surroundings. No summary depends on it."""

    price_per_worker_hour: float | None = None
    """Price of one worker for an hour, in any currency; if unset, no cost is shown."""

    def __post_init__(self) -> None:
        if self.price_per_worker_hour is not None:
            at_least("report.price_per_worker_hour", self.price_per_worker_hour, 0)
