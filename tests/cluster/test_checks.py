import shutil

from specextend.cluster.checks import check_run, check_same_run
from specextend.data.fingerprint import fingerprint, other_configuration, write_manifest
from specextend.data.prompts import CLOCK, Prompts
from specextend.models.causal_lm import load_tokenizer
from tests.cluster.conftest import MODELS, Job


def test_a_template_that_asks_the_clock_is_told_the_time_at_which_the_run_began(tmp_path):
    """After midnight, and on another worker, the prompts were others under one fingerprint."""
    job = Job(tmp_path, ["one", "two"], {})
    job.target = shutil.copytree(MODELS / "target", tmp_path / "target")
    template = "{{ strftime_now('%H:%M:%S') }} {{ messages[-1].content }}"
    (job.target / "chat_template.jinja").write_text(template)
    begun = check_run(job.config())
    begun.manifest["identity"]["config"][f"prompt.template_options.{CLOCK}"] = "2026-01-31T08:00:00"
    begun.manifest["fingerprint"] = fingerprint(begun.manifest["identity"])
    write_manifest(begun.output, begun.manifest)
    again = check_run(job.config())
    assert check_same_run(again)
    assert again.manifest == begun.manifest
    tokenizer = load_tokenizer(str(job.target))
    worker = Prompts(tokenizer, again.config.prompt, 1000)
    for prompts in again.tasks[0].prompts, worker:
        assert tokenizer.decode(prompts.render("x", 0).token_ids).startswith("08:00:00 ")
    job.sections = {"output": {"path": "other"}}
    assert not other_configuration(begun.manifest, check_run(job.config()).manifest)
