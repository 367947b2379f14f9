"""The full-screen view of ``sojourn top``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from rich.console import RenderableType
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from ..metrics.live_frame import LiveFrame
from .cli_error import CliError
from .top_view import DIM, LOSS, TopView, column_meanings, cut, duration

Explain = Callable[[str], RenderableType]


class ProgramTable(OptionList):
    """The programs, one in a line."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "cursor_up", show=False),
        Binding("j", "cursor_down", show=False),
        Binding("g", "first", show=False),
        Binding("G", "last", show=False),
        Binding("enter", "app.explain", show=False),
    ]


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
            box.border_title = cut(self._title, 60).replace("[", "\\[")
            box.border_subtitle = "Escape: back"
            yield Static("asking the server …", id="explanation-text", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#explanation").focus()
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
    block and raise ``CliError``. The cursor stays on the program that the user moved it to."""

    TITLE = "sojourn top"
    ENABLE_COMMAND_PALETTE = False
    # A bar would hide the last column at 80 columns. On the theme's cursor the states could not be read.
    CSS = """
    Screen { background: $background; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    ProgramTable { height: 1fr; border: none; padding: 0; scrollbar-size: 0 0; background: $background; }
    ProgramTable:focus { border: none; background-tint: transparent; }
    ProgramTable > .option-list--option { padding: 0; }
    ProgramTable > .option-list--option-highlighted { background: $background; }
    ProgramTable:focus > .option-list--option-highlighted { background: $foreground; color: $background; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        # With priority, since the filter and a screen of text would take it as a request to copy.
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("p,space", "pause", "Pause", key_display="p"),
        Binding("e", "explain", "Explain"),
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
        self._interval_s = interval_s
        self._sort = sort
        self._reverse = False
        self._needle = ""
        self._chosen = ""
        """Id of the program that the user moved the cursor to."""
        self._paused = False
        self._frame: LiveFrame | None = None
        self._error: CliError | None = None
        self._asking = False
        self._answered_s = time.monotonic()

    def compose(self) -> ComposeResult:
        yield Static(id="header")
        self._filter = Input(placeholder="filter: id, name, tenant, tool, state", id="filter")
        yield self._filter
        yield Static(id="heading")
        self._table = ProgramTable()
        yield self._table
        yield Footer()

    def on_mount(self) -> None:
        self.set_focus(self._table)
        self.set_interval(self._interval_s, self._tick)
        self._draw()
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
        try:
            answer: LiveFrame | CliError = self._fetch()
        except CliError as error:
            answer = error
        self.call_from_thread(self._took, answer)

    def _took(self, answer: LiveFrame | CliError) -> None:
        self._asking = False
        self._error = answer if isinstance(answer, CliError) else None
        if not isinstance(answer, CliError):
            self._frame, self._answered_s = answer, time.monotonic()
        if not self._paused:
            self._draw()

    def _draw(self) -> None:
        if (view := self._view()) is not None:
            lines = view.programs(self._needle)
            with self.prevent(OptionList.OptionHighlighted):
                self._table.set_options(Option(line, id) for id, line in lines.items())
                if lines:
                    known = self._chosen in lines
                    self._table.highlighted = self._table.get_option_index(self._chosen) if known else 0
            self._show("#heading", view.heading())
        self._draw_header()

    def _draw_header(self) -> None:
        width = self.size.width
        if (view := self._view()) is None:
            texts = [(f"sojourn top  {self._url}", "bold"), ("asking …", DIM)]
            if (error := self._error) is not None:
                again = f"asking again every {duration(self._interval_s)}"
                texts[1:] = [(error.message, LOSS), (f"next: {error.next_step}", ""), (again, DIM)]
            self._show("#header", [Text(cut(text, width), style) for text, style in texts])
            return
        note = "PAUSED" if self._paused else ""
        if self._error:
            note = f"no answer for {duration(time.monotonic() - self._answered_s)}"
        table, place = self._table, ""
        if table.highlighted is not None and table.option_count > table.size.height:
            place = f"{table.highlighted + 1}/{table.option_count}"
        lines = view.header(note=note, place=place)
        if self._needle:
            matches = f"{table.option_count} match “{self._needle}”; Escape shows all"
            lines.append(Text(cut(matches, width), "bold"))
        self._show("#header", lines)

    def _view(self) -> TopView | None:
        """Return the view of the newest frame; ``None``: no server has answered yet."""
        if self._frame is None:
            return None
        return TopView(self._frame, self.size.width, url=self._url, sort=self._sort, reverse=self._reverse)

    def _show(self, where: str, lines: list[Text]) -> None:
        for widget in self.query(where).results(Static):
            widget.update(Text("\n").join(lines))

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        self._chosen = event.option_id or ""
        self._draw_header()

    # -- keys ----------------------------------------------------------------------

    def action_sort(self) -> None:
        """Sort by the next column."""
        if (view := self._view()) is not None:
            names = view.sortable()
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
        self._filter.display = True
        self.set_focus(self._filter)

    def action_unfilter(self) -> None:
        """Close the filter and show all programs."""
        self._filter.value = ""
        self.on_input_submitted()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._needle = event.value.strip()
        self._draw()

    def on_input_submitted(self) -> None:
        self._filter.display = False
        self.set_focus(self._table)

    def action_columns(self) -> None:
        """Say what the columns mean."""
        self.push_screen(ExplanationScreen("columns", lambda _: column_meanings()))

    def action_explain(self) -> None:
        """Explain the program under the cursor."""
        line = self._table.highlighted_option
        if line is not None and line.id is not None:
            self.push_screen(ExplanationScreen(line.id, self._explain))
