"""What a figure of the report is: a question, its answer, a drawing, and the data behind them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from belayer.observe._markup import Markup, join, tag
from belayer.observe._plot import drawing, legend


@dataclass(frozen=True, slots=True)
class Data:
    """What a figure was drawn from, as a table: names of the columns, then the rows."""

    columns: tuple[str, ...]
    rows: list[tuple[object, ...]]

    def link(self, name: str) -> Markup:
        """A link that saves the table as CSV; the table is in the link."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        address = "data:text/csv;charset=utf-8," + quote(text.getvalue().encode("utf-8", "replace"))
        rows = f"{len(self.rows)} row{'' if len(self.rows) == 1 else 's'}"
        link = tag("a", f"{name}.csv", href=address, download=f"{name}.csv")
        return tag("p", "Source data: ", link, f" ({rows}: {', '.join(self.columns)})", class_="data")


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: its question, the answer that the data gives, how to read it, the drawing, and the data itself.

    Without a `body` it says in `missing` why nothing is drawn. Made by `drawn` and `not_drawn`.
    """

    name: str
    question: str
    reading: str
    body: Markup | None
    missing: str = ""
    legend: Markup | None = None
    answer: str = ""
    data: Data | None = None

    def render(self) -> Markup:
        inside: Markup
        if self.body is None:
            inside = tag("p", tag("strong", "Not drawn: "), self.missing, class_="missing")
        else:
            inside = join(
                [
                    tag("p", self.answer, class_="answer") if self.answer else None,
                    tag("p", self.reading, class_="reading"),
                    self.legend,
                    tag("div", self.body, class_="scroll"),
                    self.data.link(self.name) if self.data is not None else None,
                ]
            )
        return tag("section", tag("h2", self.question), inside, id=self.name, class_="figure")


def not_drawn(name: str, question: str, why: str) -> Figure:
    """A figure for which there is no data. `why` ends the sentence "Not drawn: …"."""
    return Figure(name, question, "", None, why)


def drawn(
    name: str,
    question: str,
    *,
    answer: str,
    reading: str,
    parts: list[Markup],
    height: float,
    title: str,
    entries: Iterable[tuple[str, str]] = (),
    columns: tuple[str, ...],
    rows: list[tuple[object, ...]],
) -> Figure:
    """A figure with its drawing.

    `parts` lie on a canvas of `height` pixels, which `title` describes for those who do not see it; `entries` are the
    legend's (see `legend`); `columns` and `rows` are the table that it was drawn from.
    """
    shown = tuple(entries)
    return Figure(
        name,
        question,
        reading,
        drawing(height, title, join(parts)),
        legend=legend(*shown) if shown else None,
        answer=answer,
        data=Data(columns, rows),
    )
