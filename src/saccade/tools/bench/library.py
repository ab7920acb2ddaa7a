"""The workloads that ask an engine in this process through the library, as a program would."""

import statistics
from collections.abc import Callable

from saccade.tools.bench.figures import Parameters, Row, median_row
from saccade.tools.bench.options import Workload
from saccade.tools.bench.session import Question, Session

QUESTIONS_PER_PICTURE = 8  # of vlm_16img_x8q
FIRST_TOKENS = 9  # on a GPU, of a timed run, whose median counts: one is over within some milliseconds


def text_step(session: Session, workload: Workload) -> list[Row]:
    scale = session.scale(workload)
    session.require_room(workload, scale)

    def questions() -> list[Question]:
        return [Question(session.inputs.text(scale.input_tokens)) for _ in range(scale.requests)]

    def once() -> float:
        # New prompts each time: the second run must not find the first one's in the prefix cache.
        first = session.ask(questions(), 1).seconds
        whole = session.ask(questions(), scale.output_tokens).seconds
        return (whole - first) / (scale.output_tokens - 1) * 1e3

    samples = session.repeat(workload, scale.repeat, once)
    parameters = {"batch": scale.requests, "in": scale.input_tokens, "out": scale.output_tokens}
    row = median_row(workload.name, "step", "ms", samples, parameters=parameters)
    rate = f"{scale.requests / row.value * 1e3:,.0f} tok/s" if row.value > 0 else ""
    return [median_row(workload.name, "step", "ms", samples, parameters=parameters, note=rate)]


def text_throughput(session: Session, workload: Workload) -> list[Row]:
    scale = session.scale(workload)
    session.require_context(workload, scale)

    def once() -> float:
        questions = [Question(session.inputs.text(scale.input_tokens)) for _ in range(scale.requests)]
        return scale.requests * scale.output_tokens / session.ask(questions, scale.output_tokens).seconds

    samples = session.repeat(workload, scale.repeat, once)
    parameters = {"requests": scale.requests, "in": scale.input_tokens, "out": scale.output_tokens}
    return [median_row(workload.name, "throughput", "tok/s", samples, better="higher", parameters=parameters)]


def ttft_unique(session: Session, workload: Workload) -> list[Row]:
    scale = session.scale(workload)
    session.require_context(workload, scale)
    inputs = session.inputs

    def once() -> float:
        question = Question(inputs.about_picture(scale.input_tokens), inputs.picture(scale.size))
        return session.ask([question], 1).seconds * 1e3

    return [_first_token(session, workload, once)]


def ttft_repeat(session: Session, workload: Workload) -> list[Row]:
    scale = session.scale(workload)
    session.require_context(workload, scale)
    picture = session.inputs.picture(scale.size)

    def once() -> float:
        question = Question(session.inputs.about_picture(scale.input_tokens), picture)
        return session.ask([question], 1).seconds * 1e3

    once()  # the picture becomes known
    return [_first_token(session, workload, once)]


def _first_token(session: Session, workload: Workload, once: Callable[[], float]) -> Row:
    scale = session.scale(workload)
    asked = FIRST_TOKENS if session.on_cuda else 1

    def some() -> float:
        return statistics.median(once() for _ in range(asked))

    samples = session.repeat(workload, scale.repeat, some)
    parameters: Parameters = {"size": "{}x{}".format(*scale.size), "in": scale.input_tokens, "each": asked}
    return median_row(workload.name, "ttft", "ms", samples, parameters=parameters)


def vlm_unique(session: Session, workload: Workload) -> list[Row]:
    return _pictures_at_once(session, workload, pictures=session.scale(workload).requests, known=False)


def vlm_repeat(session: Session, workload: Workload) -> list[Row]:
    return _pictures_at_once(session, workload, pictures=session.scale(workload).requests, known=True)


def vlm_shared(session: Session, workload: Workload) -> list[Row]:
    pictures = max(1, session.scale(workload).requests // QUESTIONS_PER_PICTURE)
    return _pictures_at_once(session, workload, pictures=pictures, known=False)


def _pictures_at_once(session: Session, workload: Workload, *, pictures: int, known: bool) -> list[Row]:
    """All requests together; request i is about picture i modulo their number."""
    scale = session.scale(workload)
    session.require_context(workload, scale)
    inputs = session.inputs

    def once() -> float:
        shown = [inputs.picture(scale.size) for _ in range(pictures)]

        def questions() -> list[Question]:
            return [
                Question(inputs.about_picture(scale.input_tokens), shown[number % pictures])
                for number in range(scale.requests)
            ]

        if known:
            session.ask(questions(), 1)
        return scale.requests / session.ask(questions(), scale.output_tokens).seconds

    samples = session.repeat(workload, scale.repeat, once)
    parameters: Parameters = {
        "requests": scale.requests,
        "pictures": pictures,
        "size": "{}x{}".format(*scale.size),
        "in": scale.input_tokens,
        "out": scale.output_tokens,
    }
    return [median_row(workload.name, "throughput", "req/s", samples, better="higher", parameters=parameters)]


RUN: dict[str, Callable[[Session, Workload], list[Row]]] = {
    "text_bs": text_step,
    "text_throughput": text_throughput,
    "ttft_unique": ttft_unique,
    "ttft_repeat": ttft_repeat,
    "vlm_unique": vlm_unique,
    "vlm_repeat": vlm_repeat,
    "vlm_16img_x8q": vlm_shared,
}
