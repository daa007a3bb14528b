"""What transformers' own `generate` says, and the comparison that knows ties."""

from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence

TIE = 1e-4
"""Logits this close are equal: another order of summation may swap them."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A greedy output of transformers."""

    token_ids: list[int]
    logits: torch.Tensor
    """[n, V], as penalties left them"""


def tokens_of(completions):
    """The tokens of outputs, by the names of their requests."""
    return {each.request_id: each.token_ids for each in completions}


def generate(model, prompt, max_new_tokens, **options):
    """Greedy `generate`, stopped by the model's own EOS; `options` are more of its arguments."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return Reference(output.sequences[0, len(prompt) :].tolist(), torch.cat(output.scores).float())


@torch.inference_mode()
def log_probs_after(model, prompt, paths):
    """Return for each path the log probabilities fp64 of its tokens after the prompt."""
    inputs = pad_sequence([torch.tensor([*prompt, *path]) for path in paths], batch_first=True)
    log_probs = model(input_ids=inputs, use_cache=False).logits[:, len(prompt) - 1 : -1].double().log_softmax(-1)
    found = log_probs.gather(2, inputs[:, len(prompt) :, None])[:, :, 0]
    return [each[: len(path)] for each, path in zip(found, paths, strict=True)]


def score_values(model, tokenizer, prompt, texts):
    """Return the log probability [N] fp64 of each text after the prompt, normalised over the texts."""
    paths = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.stack([each.sum() for each in log_probs_after(model, prompt, paths)]).log_softmax(0)


def score_choices(model, tokenizer, prompt, choices):
    """Return the likeliest values of choices as a text, and the log probabilities fp64 of all values."""
    text = ""
    expected = []
    for choice in choices:
        texts = [text + each for each in choice.texts]
        expected.append(score_values(model, tokenizer, prompt, texts))
        text = texts[int(expected[-1].argmax())]
    return text, torch.cat(expected)


@dataclass(slots=True)
class Ties:
    """Compares outputs, and counts the differences that are none."""

    num_compared: int = 0
    found: list[str] = field(default_factory=list)

    def assert_equal(self, token_ids, reference, what):
        """Equal token for token, or different first where the reference's two logits are a tie."""
        self.num_compared += 1
        if token_ids == reference.token_ids:
            return
        pairs = zip(token_ids, reference.token_ids, strict=False)
        at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        assert at is not None, f"{what}: {len(token_ids)} tokens, transformers has {len(reference.token_ids)}"
        ours, theirs = (float(reference.logits[at, tokens[at]]) for tokens in (token_ids, reference.token_ids))
        assert abs(ours - theirs) <= TIE, (
            f"{what}: token {at} is {token_ids[at]}, transformers has a logit {theirs - ours} higher"
        )
        self.found.append(f"{what}, token {at}")

    def summary(self):
        """One line for people."""
        return f"{self.num_compared} outputs compared with transformers, {len(self.found)} ties {self.found or ''}"
