"""Retrieval with prompts that share prefixes, measured on a small model, before and after.

    python docs/examples/rag.py

An assistant answers questions from documents that a retriever ranks anew for every question. `naive` puts the prompt
together as most code does; `stable` has the same parts in another order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tierkv
from tierkv.engines.transformers import generate
from tierkv.service.demo.model import find_checkpoint, load_model

ROLE = "You answer questions about a library of small programs. Answer from the documents, in one sentence."
DOCUMENTS = {
    "doc-03-cache": """The cache keeps the answers of functions. It is bounded: when it is full, the answer that was not
asked for longest leaves first. Each answer is kept for an hour, unless its function says otherwise. Functions that
change something outside must not be cached. Calling clear() forgets everything, which tests do first.""",
    "doc-07-queue": """The queue hands jobs to workers in the order of their priority, and jobs of equal priority in the
order they came. A worker that has taken a job must confirm it within its lease, or another worker gets the job. After
five leases without a confirmation a job is set aside and counted, and nobody gets it any more.""",
    "doc-12-mail": """The mailer sends in batches of one hundred, once a minute. An address that was refused twice is
left out until somebody clears it. Attachments may have ten megabytes. Nothing is sent at night unless it is marked as
urgent, and whatever is marked as urgent more than three times a day is treated like everything else.""",
    "doc-21-log": """The log writes one line for each event, as text or as JSON. Lines are never longer than a page;
what is longer is cut and says so. A new file begins at midnight, and files older than thirty days are removed. Secrets
are recognised by the names of their fields and replaced by a row of stars before anything is written.""",
}
SCORES: Sequence[tuple[str, dict[str, float]]] = (
    ("How long is an answer kept?", {"doc-03-cache": 0.91, "doc-07-queue": 0.48, "doc-21-log": 0.44}),
    ("What happens to old files?", {"doc-21-log": 0.93, "doc-03-cache": 0.52, "doc-07-queue": 0.37}),
    ("Which job comes first?", {"doc-07-queue": 0.86, "doc-03-cache": 0.41, "doc-21-log": 0.33}),
    ("Is a password ever written down?", {"doc-21-log": 0.81, "doc-07-queue": 0.35, "doc-03-cache": 0.29}),
    ("When are mails sent?", {"doc-12-mail": 0.95, "doc-07-queue": 0.61, "doc-03-cache": 0.33}),
)


@dataclass(frozen=True)
class Request:
    time: str
    question: str
    scores: dict[str, float]


def naive(request: Request) -> str:
    """What changes comes first, and documents in the order of their scores: no two prompts begin alike."""
    best = sorted(request.scores, key=lambda name: -request.scores[name])
    found = "\n\n".join(f"[score {request.scores[name]}] {DOCUMENTS[name]}" for name in best)
    return f"Now it is {request.time}.\nQuestion: {request.question}\n\n{ROLE}\n\n{found}\n\nAnswer:"


def stable(request: Request) -> str:
    """What never changes first, then documents in the order of their names, and last what is new each time."""
    found = "\n\n".join(f"[{name}] {DOCUMENTS[name]}" for name in sorted(request.scores))
    return f"{ROLE}\n\n{found}\n\nNow it is {request.time}.\nQuestion: {request.question}\n\nAnswer:"


def measure(build: Callable[[Request], str]) -> str:
    reused = total = 0
    with tierkv.open({"warm": {"capacity": "256MiB"}}) as cache:  # or tierkv.connect() to a daemon
        cache.register(loaded.spec)
        for request in requests:
            tokens = loaded.tokenizer.encode(build(request))
            answer = generate(loaded.model, cache, loaded.spec, tokens, max_new_tokens=1)
            reused, total = reused + answer.reused_tokens, total + answer.prompt_tokens
    share = f"{reused:>5,} of {total:,} prompt tokens reused ({reused / total:.0%})"
    return f"{build.__name__:<7} {share}, {total - reused:,} computed"


loaded = load_model(find_checkpoint())
requests = [Request(f"09:{minute:02}", *asked) for minute, asked in enumerate(SCORES)]
for build in (naive, stable):
    print(measure(build))
