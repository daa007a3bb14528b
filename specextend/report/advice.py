"""Rules that find problems of texts and of speed in a report. Begin at `give_advice`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specextend.core import ReadOnly, Values, counted
from specextend.decoding.decoding_options import LEAST_SPEEDUP
from specextend.report.sections import duration, look_up, num_texts, number, shortened
from specextend.stats import DecodingStats, ratio

Report = ReadOnly
LEAST_DOCUMENTS = 5
"""Fewest documents for conclusions about speed."""
MOST_IDS = 3
"""Ids in a finding."""
ALL_SEEN = 0.95
"""Share of attention in the draft's view above which a larger view is useless."""
RARE = 0.1
"""Share of speculative steps below which speculation cannot be judged."""


@dataclass(frozen=True)
class Finding:
    """A problem of a run."""

    says: str
    weight: float
    """Share of the documents or of the time; above 1 for missing or wrong texts."""
    section: str
    """Title of the section with the figures."""
    evidence: Mapping[str, float | int | str]
    doc_ids: Sequence[str] = ()
    """Examples."""


def give_advice(report: Report) -> list[Values]:
    """Apply every rule to a report. Findings about texts come first, each group by weight."""
    advice: list[Values] = []
    for rules in (OF_TEXTS, OF_TIME):
        found = [(rule.__name__, finding) for rule in rules if (finding := rule(report))]
        advice += [_entry(*each) for each in sorted(found, key=lambda each: -each[1].weight)]
    return advice


def _entry(rule: str, finding: Finding) -> Values:
    ids = [shortened(doc_id) for doc_id in finding.doc_ids[:MOST_IDS]]
    says = f"{finding.says} For example {', '.join(ids)}." if ids else finding.says
    return {
        "rule": rule,
        "says": says,
        "evidence": finding.evidence,
        "section": finding.section,
        "doc_ids": ids,
    }


def most_failed(report: Report) -> Finding | None:
    """Name the most frequent error."""
    failed = report["rows"]["errors"]
    if not failed:
        return None
    first = report["errors"][0]
    kinds = f"{first['error_class']} ({first['stage']})"
    retry = (
        "--retry-errors does them again"
        if first["retryable"]
        else "another try with these settings would fail in the same way"
    )
    says = (
        f"{counted(failed, 'document')} failed, {number(first['rows'])} of them with {kinds}: "
        f"{retry}."
    )
    evidence = {"failed": failed, "rows": first["rows"], "error_class": first["error_class"]}
    weight = 1 + failed / (failed + report["rows"]["done"])
    return Finding(says, weight, "Failed documents", evidence, first["doc_ids"])


def truncated(report: Report) -> Finding | None:
    """Report texts that were cut."""
    flags = report["quality_flags"]
    rows = flags.get("truncated", 0)
    loops = flags.get("repeated", 0)
    share = ratio(rows, num_texts(report)) or 0.0
    if share < 0.05:
        return None
    is_loop = loops > rows / 2 and not look_up(report, "run.decoding.stop_repetition")
    advice = "most repeat themselves, so set decoding.stop_repetition" if is_loop else "raise it"
    column = look_up(report, "run.input.options_column")
    own = f" or the limit in column '{shortened(column)}'" if column else ""
    if not is_loop and not column:
        advice += ", and do them again with --redo \"list_contains(quality_flags, 'truncated')\""
    of = f"{rows:,} of {counted(num_texts(report), 'text')} ({share:.0%})"
    says = f"{of} were cut at decoding.max_new_tokens{own}: {advice}."
    return Finding(
        says,
        share,
        "Texts to look at",
        {"documents": rows, "share": share},
        report["flagged"]["truncated"],
    )


def not_in_document(report: Report) -> Finding | None:
    """Report strings that are not in their documents."""
    strings, found = (
        sum(field[name] for field in report["evidence"].values()) for name in ("strings", "found")
    )
    share = ratio(strings - found, strings) or 0.0
    if share < 0.2:
        return None
    says = (
        f"{share:.0%} of {counted(strings, 'string')} of the answers do not stand in their "
        "documents: check them."
    )
    return Finding(says, 1 + share, "Evidence", {"share": share})


def figures_not_found(report: Report) -> Finding | None:
    """Report figures that are not in their documents."""
    of = report["figures"]
    flagged = report["quality_flags"].get("figure_not_found", 0)
    if not flagged:
        return None
    share = of["not_found"] / of["figures"]
    says = (
        f"{of['not_found']:,} of {counted(of['figures'], 'figure')} ({share:.0%}), in "
        f"{counted(flagged, 'text')}, cannot be found in the documents: check "
        "them (column figures)."
    )
    evidence = {"not_found": of["not_found"], "share": share}
    ids = report["flagged"]["figure_not_found"]
    return Finding(says, 1 + share, "Texts to look at", evidence, ids)


def dropped(report: Report) -> Finding | None:
    """Report documents that were cut."""
    tokens = report["tokens"]
    share = ratio(tokens["dropped"], tokens["dropped"] + tokens["prompt"])
    if share is None or share < 0.05:
        return None
    prompt = look_up(report, "run.prompt") or {}
    ways = ["take a target with a longer context"]
    if prompt.get("max_prompt_tokens") is not None:
        ways.insert(0, "raise prompt.max_prompt_tokens")
    if prompt.get("length_policy") != "parts":
        ways.append("set prompt.length_policy to parts, which reads long documents in parts")
    says = (
        f"{share:.0%} of the documents' tokens were dropped because prompts were too long "
        "(num_dropped_tokens): the "
        f"answers cannot say what was there. To read them, {', or '.join(ways)}."
    )
    return Finding(
        says,
        share,
        "Texts to look at",
        {"dropped_share": share},
        report["flagged"].get("shortened", ()),
    )


def prefill_bound(report: Report) -> Finding | None:
    """State the limit of any speed-up of decoding by Amdahl's law."""
    shares = _phases(report)
    if (
        shares is None
        or not 0.3 <= (prefill := shares["prefill"] + shares["draft_prefill"]) <= 0.95
    ):
        # above 95% there is nothing to decode: answers are scored
        return None
    limit = 1 / prefill
    share = report["acceptance"]["speculative_share"]
    end = "so speculation cannot give more than that here"
    if (
        share is not None
        and share < RARE
        and look_up(report, "run.decoding.mode") != "autoregressive"
    ):
        end = f"and only {share:.0%} of the steps were speculative"
    says = (
        f"{prefill:.0%} of the work on documents is prefill, reading the prompts: with decoding "
        f"for free it would be {limit:.1f} times as fast, {end}."
    )
    return Finding(
        says, prefill, "Where the time of the work went", {"prefill_share": prefill, "limit": limit}
    )


def drafting_cost(report: Report) -> Finding | None:
    """Report speculative steps that hardly pay."""
    shares = _phases(report)
    length = report["acceptance"]["mean_acceptance_length"]
    if shares is None or length is None or not shares["verify"]:
        return None
    drafting = shares["draft"] + shares["retrieval"]
    cost = drafting / shares["verify"]
    if length >= 1.1 * (1 + cost):
        return None
    smaller = "" if look_up(report, "run.tree.nodes") == "auto" else "fewer tree.nodes, "
    says = (
        f"A speculative step brings {length:.2f} tokens; drafting and retrieval add {cost:.0%} to "
        "its verification. "
        f"That hardly pays: try {smaller}decoding.mode autoregressive, or another draft."
    )
    return Finding(
        says,
        drafting,
        "Where the time of the work went",
        {"acceptance_length": length, "cost": cost},
    )


def drafts_lose(report: Report) -> Finding | None:
    """Report that drafts made documents slower."""
    trials = report["drafting"]
    turns = look_up(report, "audit.speedup.end_to_end")
    if trials and trials["min"] < LEAST_SPEEDUP:
        where = f"trials of {counted(trials['n'], 'worker')}, which stop drafting where that loses,"
        found, section = trials, "Run"
    elif turns and turns["max"] < LEAST_SPEEDUP:
        where = f"{counted(turns['n'], 'turn')} of the audit"
        found, section = turns, "Audit"
    else:
        return None
    says = (
        f"In {where} a document was {found['median']:.2f} times as fast with drafts as without "
        f"({found['min']:.2f} to {found['max']:.2f}): set decoding.mode to autoregressive, take a "
        "smaller decoding.max_batch_size, or another draft."
    )
    return Finding(says, 1 - found["median"], section, found)


def draft_misses(report: Report) -> Finding | None:
    """Report a draft network that seems wrong for its target."""
    found = report["acceptance"]
    names = ("num_network_steps", "num_first_accepted")
    stats = DecodingStats(**{name: found[name] for name in names})
    says = stats.doubt(look_up(report, "run.draft.kind"), report["rows"]["done"])
    evidence = {"first_acceptance_rate": found["first_acceptance_rate"]}
    return Finding(says, 1.0, "Run", evidence) if says else None


def acceptance_falls(report: Report) -> Finding | None:
    """Report low acceptance for long prompts."""
    known = [
        bucket
        for bucket in report["buckets"]
        if bucket["mean_acceptance_length"] is not None and bucket["documents"] >= LEAST_DOCUMENTS
    ]
    if not known:
        return None
    best = max(known, key=lambda bucket: bucket["mean_acceptance_length"])
    last = known[-1]
    low = last["mean_acceptance_length"]
    high = best["mean_acceptance_length"]
    if low > 0.8 * high:
        return None
    seen = last["retrieval_coverage"]
    if seen is None or seen >= ALL_SEEN:
        advice = "the draft saw what mattered, so only a draft for longer texts would change that"
    else:
        advice = (
            "a larger cache.top_k_chunks shows the draft more of long prompts, of which it "
            f"saw {seen:.0%}"
        )
    says = (
        f"The acceptance length falls from {high:.2f} (prompts up to {best['bucket']}) to "
        f"{low:.2f} (up to {last['bucket']}): {advice}."
    )
    weight = (1 - low / high) * last["documents"] / num_texts(report)
    return Finding(
        says, weight, "By prompt length", {"best": high, "longest": low, "bucket": last["bucket"]}
    )


def idle_tail(report: Report) -> Finding | None:
    """Report idle workers at the end."""
    tail = report["tail"]
    if tail is None or not tail["idle_workers"] or tail["documents"] < LEAST_DOCUMENTS:
        return None
    idle = tail["idle_workers"]
    workers = tail["workers"]
    seconds = tail["idle_median_s"]
    says = (
        f"{idle:,} of {counted(workers, 'worker')} stood idle for {duration(seconds)} at the end, "
        "while the last documents were decoded: fewer workers would have finished almost as soon; "
        "more documents in one run make the end matter less."
    )
    weight = ratio(idle * seconds, sum((report["wall_clock"]["paid_s"] or {}).values())) or 0.0
    return Finding(
        says,
        weight,
        "The workers' time",
        {"idle_workers": idle, "workers": workers, "idle_s": seconds},
    )


def loading(report: Report) -> Finding | None:
    """Report that loading models took long."""
    share = (report["wall_clock"]["shares"] or {}).get("loading", 0.0)
    if share < 0.1:
        return None
    fewer = "" if look_up(report, "run.job.workers") == 1 else ", or take fewer workers"
    says = (
        f"Loading models took {share:.0%} of the paid time: process more documents in each start"
        f"{fewer}."
    )
    return Finding(says, share, "The workers' time", {"loading_share": share})


Rules = tuple[Callable[[Report], Finding | None], ...]
OF_TEXTS: Rules = (most_failed, not_in_document, figures_not_found, truncated, dropped)
OF_TIME: Rules = (
    prefill_bound,
    draft_misses,
    drafts_lose,
    drafting_cost,
    acceptance_falls,
    idle_tail,
    loading,
)


def _phases(report: Report) -> dict[str, float] | None:
    shares = report["time"]["shares"]
    is_unknown = any(share is None for share in shares.values())
    return None if is_unknown or num_texts(report) < LEAST_DOCUMENTS else shares
