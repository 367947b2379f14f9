"""The full-screen view of ``sojourn top``. Only the lines in sight are drawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from rich.console import RenderableType
from rich.segment import Segment
from rich.style import Style
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.geometry import Region, Size
from textual.message import Message
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, Static

from ..metrics.live_frame import LiveFrame
from . import top_view
from .cli_error import CliError

Explain = Callable[[str], RenderableType]
_PLAIN = Style()
"""Style of every segment without another. With ``NO_COLOR``, textual fails at a segment that has none."""


def _strip(line: top_view.Line, width: int, base: Style = _PLAIN) -> Strip:
    segments = [Segment(text, base + Style.parse(style)) for text, style in line]
    return Strip(segments).adjust_cell_length(width, base)


class _Lines(Static):
    """A widget that draws styled lines of text. Markup in the text is not interpreted."""

    DEFAULT_CSS = "_Lines { height: auto; }"

    lines: list[top_view.Line]

    def show(self, lines: list[top_view.Line]) -> None:
        self.lines = lines
        self.update(top_view.as_text([("\n", "")]).join(map(top_view.as_text, lines)))


class ProgramTable(ScrollView, can_focus=True):
    """The programs, one in a line, with a cursor that stays on its program."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "end(0)", show=False),
        Binding("end,G", "end(1)", show=False),
    ]

    DEFAULT_CSS = "ProgramTable { scrollbar-size: 0 0; }"  # a bar would hide the last column at 80 columns

    class Moved(Message):
        """The cursor is on another program."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[top_view.ProgramView] = []
        self.empty: top_view.Line = []
        """Line shown while there is no program."""
        self.leases = True
        """Whether the column LEASE is shown."""
        self._selected: str | None = None

    @property
    def cursor(self) -> int:
        """Line of the cursor; 0 if its program is gone."""
        for place, view in enumerate(self.views):
            if view.row.program_id == self._selected:
                return place
        return 0

    @property
    def selected(self) -> str | None:
        """Id of the program under the cursor; ``None`` if there is no program."""
        return self.views[self.cursor].row.program_id if self.views else None

    def show(self, views: list[top_view.ProgramView]) -> None:
        """Show ``views`` instead of the present programs."""
        self.views = views
        self.virtual_size = Size(max(top_view.MIN_WIDTH, self.size.width), len(views))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        _, scrolled = self.scroll_offset
        place = y + scrolled
        width = max(top_view.MIN_WIDTH, self.size.width)
        if not self.views and place == 0:
            return _strip(self.empty, self.size.width)
        if place >= len(self.views):
            return Strip.blank(self.size.width, _PLAIN)
        base = Style(reverse=True) if place == self.cursor and self.has_focus else _PLAIN
        strip = _strip(top_view.program_line(self.views[place], width, leases=self.leases), width, base)
        left = self.scroll_offset.x
        return strip.crop(left, left + self.size.width)

    def action_move(self, by: int) -> None:
        self._go(self.cursor + by)

    def action_page(self, by: int) -> None:
        self._go(self.cursor + by * max(1, self.size.height - 1))

    def action_end(self, last: int) -> None:
        self._go(len(self.views) if last else 0)

    def _go(self, place: int) -> None:
        if self.views:
            place = max(0, min(place, len(self.views) - 1))
            self._selected = self.views[place].row.program_id
            self.scroll_to_region(Region(0, place, 1, 1), animate=False)
            self.refresh()
            self.post_message(self.Moved())

    def on_click(self, event: Any) -> None:
        self._go(event.y + self.scroll_offset.y)


class ExplanationScreen(ModalScreen[None]):
    """A screen with a title and the text that ``explain`` returns for the title, such as the explanation of a
    program. Escape, q, e or ? closes the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,e,question_mark", "dismiss", "Back")]
    CSS = """
    ExplanationScreen { align: center middle; }
    #explanation { width: 100%; height: 100%; border: round $primary; background: $surface; }
    """

    def __init__(self, title: str, explain: Explain) -> None:
        super().__init__()
        self._title = title
        self._explain = explain

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="explanation") as box:
            box.border_title = top_view.cut(self._title, 60).replace("[", "\\[")
            box.border_subtitle = "Escape: back"
            yield Static("asking the server …", id="explanation-text", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#explanation", VerticalScroll).focus()
        self._ask()

    @work(thread=True)
    def _ask(self) -> None:
        try:
            text: RenderableType = self._explain(self._title)
        except CliError as failed:
            text = f"{failed.message}\n\nnext: {failed.next_step}"
        self.app.call_from_thread(self._show, text)

    def _show(self, text: RenderableType) -> None:
        if self.is_mounted:
            self.query_one("#explanation-text", Static).update(text)


class TopApp(App[None]):
    """``sojourn top``. ``fetch`` returns a frame. ``explain`` returns the explanation of a program. Both may
    block and raise ``CliError``."""

    TITLE = "sojourn top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    #filter { height: 1; border: none; padding: 0; }
    ProgramTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        # With priority, since the filter and a screen of text would take it as a request to copy.
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("p,space", "pause", "Pause", key_display="p"),
        Binding("e,enter", "explain", "Explain", key_display="e"),
        Binding("question_mark", "columns", "Columns", key_display="?"),
        Binding("escape", "unfilter", show=False),
    ]

    def __init__(
        self,
        fetch: Callable[[], LiveFrame],
        explain: Explain,
        *,
        url: str = "",
        interval_s: float = 1.0,
        sort: str = "state",
    ) -> None:
        super().__init__()
        self._fetch = fetch
        self._explain = explain
        self._url = url
        self._title: top_view.Line = [(f"sojourn top  {url}", "bold")]
        self._interval_s = interval_s
        self._sort = sort
        self._reverse = False
        self._needle = ""
        self._paused = False
        self._frame: LiveFrame | None = None
        self._error = self._next_step = ""
        self._asking = False
        self._answered_s = time.monotonic()

    def compose(self) -> ComposeResult:
        yield _Lines(id="header")
        yield Input(placeholder="filter: id, name, tenant, tool, state", id="filter")
        yield _Lines(id="heading")
        yield ProgramTable()
        yield Footer()

    def on_mount(self) -> None:
        self._head([self._title, [("asking …", "dim")]])
        self.query_one("#filter", Input).display = False
        self.set_focus(self.query_one(ProgramTable))
        self.set_interval(self._interval_s, self._tick)
        self._tick()

    def on_resize(self) -> None:
        self._draw()

    # -- data ----------------------------------------------------------------------

    def _tick(self) -> None:
        if not (self._paused or self._asking):
            self._asking = True
            self._ask()

    @work(thread=True, group="frames")
    def _ask(self) -> None:
        frame, error, next_step = None, "", ""
        try:
            frame = self._fetch()
        except CliError as failed:
            error, next_step = failed.message, failed.next_step
        self.call_from_thread(self._took, frame, error, next_step)

    def _took(self, frame: LiveFrame | None, error: str, next_step: str) -> None:
        self._asking = False
        self._error, self._next_step = error, next_step
        if frame is not None:
            self._frame, self._answered_s = frame, time.monotonic()
        if not self._paused:
            self._draw()

    def _draw(self) -> None:
        if not self.is_running or (self._frame is None and not self._error):
            return
        width = self.size.width
        note = "PAUSED" if self._paused else ""
        if self._error:
            note = f"no answer for {top_view.duration(time.monotonic() - self._answered_s)}"
        if self._frame is None:
            again = f"asking again every {top_view.duration(self._interval_s)}"
            styles = {self._error: top_view.LOSS, f"next: {self._next_step}": "", again: top_view.DIM}
            self._head(
                [self._title, *([(top_view.cut(text, width), style)] for text, style in styles.items())]
            )
            return
        table = self.query_one(ProgramTable)
        views = top_view.sorted_programs(
            self._frame, sort=self._sort, reverse=self._reverse, needle=self._needle
        )
        table.leases = top_view.shows_leases(self._frame)
        table.show(views)
        table.empty = top_view.empty_line(self._frame, self._url, width) if not self._frame.programs else []
        place = f"{table.cursor + 1}/{len(views)}" if len(views) > table.size.height else ""
        lines = top_view.header(self._frame, width, url=self._url, note=note, place=place)
        if self._needle:
            matches = f"{len(views)} match “{self._needle}”; Escape shows all"
            lines.append([(top_view.cut(matches, width), "bold")])
        self._head(lines)
        columns = top_view.heading(width, self._sort, self._reverse, leases=table.leases)
        self.query_one("#heading", _Lines).show([columns])

    def _head(self, lines: list[top_view.Line]) -> None:
        self.query_one("#header", _Lines).show(lines)

    def on_program_table_moved(self) -> None:
        self._draw()

    # -- keys ----------------------------------------------------------------------

    def action_sort(self) -> None:
        """Sort by the next column."""
        names = top_view.sortable(leases=self.query_one(ProgramTable).leases)
        place = names.index(self._sort) + 1 if self._sort in names else 0
        self._sort = names[place % len(names)]
        self._draw()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._reverse = not self._reverse
        self._draw()

    def action_pause(self) -> None:
        """Pause or continue the view. While it is paused, the server is not queried."""
        self._paused = not self._paused
        self._draw()
        self._tick()

    def action_filter(self) -> None:
        """Open the filter."""
        # Focus the filter before the next refresh, because keys typed until then belong to the filter.
        box = self.query_one("#filter", Input)
        box.display = True
        self.set_focus(box)

    def action_unfilter(self) -> None:
        """Close the filter and show all programs."""
        box = self.query_one("#filter", Input)
        box.value = ""
        self._close_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._needle = event.value.strip()
        self._draw()

    def on_input_submitted(self) -> None:
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).display = False
        self.set_focus(self.query_one(ProgramTable))

    def action_columns(self) -> None:
        """Say what the columns mean."""
        self.push_screen(ExplanationScreen("columns", lambda _: top_view.column_meanings()))

    def action_explain(self) -> None:
        """Explain the program under the cursor."""
        program_id = self.query_one(ProgramTable).selected
        if program_id is not None:
            self.push_screen(ExplanationScreen(program_id, self._explain))
