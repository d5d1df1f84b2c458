"""A conversation with an instruct model, whose cache keeps what was said between turns."""

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TYPE_CHECKING

from tokenization import Text


if TYPE_CHECKING:  # it imports this file
    from generate import Generator


class Conversation:
    """Questions and answers so far, and the tokens that the cache of the generator holds."""

    def __init__(
        self,
        generate: "Generator",
        text: Text,
        stop: frozenset[int] = frozenset(),
        tokens: int = 512,
        system: str | None = None,
        seed: int = 0,
    ) -> None:
        self.generate, self.text, self.stop, self.tokens, self.seed = generate, text, stop, tokens, seed
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.first = len(self.messages)  # the first message that may be dropped
        self.ids: list[int] = []
        text.chat([*self.messages, {"role": "user", "content": ""}])  # raises at once if there is no chat template

    def ask(self, question: str) -> Iterator[str]:
        """Yields the answer, piece by piece."""
        self.messages.append({"role": "user", "content": question})
        ids = self._fit()
        same = sum(1 for _ in _common(self.ids, ids[:-1]))  # read at least one token, to predict the next
        same = self.generate.kept(same)
        answer: list[int] = []
        shown = ""
        room = min(self.tokens, self.generate.context - len(ids))
        try:
            seed = self.seed + len(self.messages)  # another for each turn
            for (token,) in self.generate([ids[same:]], room, stop=self.stop, seed=seed, after=same):
                if token is None:
                    break
                answer.append(token)
                so_far = self.text.decode(answer)
                # An incomplete character waits for the next token.
                if not so_far.endswith("\ufffd"):
                    yield so_far.removeprefix(shown)
                    shown = so_far
            if rest := self.text.decode(answer).removeprefix(shown):
                yield rest
        finally:
            self.ids = [*ids, *answer[:-1]]  # the last token may not have been read yet
            self.messages.append({"role": "assistant", "content": self.text.decode(answer)})

    def _fit(self) -> list[int]:
        """The tokens of the conversation. Drops the oldest turns until there is room for an answer."""
        context = self.generate.context
        while len(ids := self.text.chat(self.messages)) + min(self.tokens, context // 4) > context:
            if len(self.messages) == self.first + 1:
                self.messages.pop()
                raise ValueError(
                    f"A question must leave room for an answer in the context of {context:,} tokens. Got {len(ids):,}. "
                    "Set a larger `--context`."
                )
            del self.messages[self.first : self.first + 2]
        return ids


def _common(a: Sequence[int], b: Sequence[int]) -> Iterator[int]:
    """The tokens with which both begin."""
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def talk(conversation: Conversation, questions: Sequence[str] = ()) -> None:
    """Answers the questions; without any, reads them from the terminal until Ctrl-D."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - so that `input` has a history

        print("Ctrl-C ends an answer, and Ctrl-D the conversation.", file=sys.stderr)
    for question in questions or _typed():
        with contextlib.closing(conversation.ask(question)) as pieces, _interruptible() as interrupted:
            for piece in pieces:
                print(piece, end="", flush=True)
                if interrupted:
                    break
        print()


def _typed() -> Iterator[str]:
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return print()
        if question.strip():
            yield question


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """A list that the first Ctrl-C makes non-empty. A second one raises as usual."""
    interrupted: list[int] = []

    def note(number: int, frame: Any) -> None:
        interrupted.append(number)
        signal.signal(signal.SIGINT, old)

    old = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, old)
