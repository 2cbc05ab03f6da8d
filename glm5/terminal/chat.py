"""`glm5 chat`: reads questions and commands, and shows answers as they are generated."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.engine import Engine
from glm5.engine.penalties import LOWEST_TEMPERATURE
from glm5.errors import CheckpointError, EngineError, Glm5Error, UsageError, nearest
from glm5.records import Message, SamplingParams, ToolCall
from glm5.serve.app import load_defaults
from glm5.serve.prompts import ChatInput, Mode, Prompt, render
from glm5.serve.reply import Reply
from glm5.serve.samples import Delta
from glm5.terminal.conversation import Conversation, load_tools
from glm5.terminal.screen import Screen

MAX_TOKENS = 1024
HELP = """\
/help             this list
/thinking         show the last reasoning; /thinking on or off switches thinking
/effort LEVEL     how much to think, if the model's template has effort levels
/system TEXT      set the system prompt; without TEXT, remove it
/retry            answer the last question again
/undo             remove the last question and its answer
/clear            remove all messages
/save FILE        write the conversation as JSON; /load FILE reads it
/temperature X    0 always takes the most likely token
/max N            maximum tokens of an answer
/quit             end the chat; so does Ctrl-D
//text            send "/text" to the model
After a backslash at its end, a line continues on the next one. Ctrl-C stops an answer."""


def run(
    directory: str | Path,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    system: str = "",
    thinking: bool = True,
    tools: str | Path | None = None,
    chat_template: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
) -> None:
    """Chat with the model of a checkpoint directory until the input ends. Parameters not given come from its
    generation_config.json; without a seed every chat differs.

    Raises:
        UsageError: the temperature is not valid.
        DataError: `tools` is not a file of tool specifications.
        CheckpointError: no model, or no matching tokenizer.
    """
    directory = Path(directory)
    params = replace(load_defaults(directory), max_tokens=max_tokens or MAX_TOKENS)
    if temperature is not None:
        params = replace(params, temperature=_temperature(temperature))
    conversation = Conversation(system, load_tools(Path(tools)) if tools else ())
    engine = Engine.from_pretrained(
        directory,
        max_batch=1,
        seed=secrets.randbits(62) if seed is None else seed,
        chat_template=chat_template,
        device=device,
        dtype=dtype,
    )
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise CheckpointError(f"{directory} has no tokenizer.json; a chat needs one to read and write text.")
    if tokenizer.vocab_size > engine.model.config.vocab_size:
        raise CheckpointError(
            f"The tokenizer of {directory} has more ids than the model; use the tokenizer of this model."
        )
    chat = TerminalChat(engine, tokenizer, Screen(), conversation, params, thinking=thinking)
    chat.run(f"{directory.resolve().name}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat.")


def _temperature(value: float) -> float:
    if value != 0 and not LOWEST_TEMPERATURE <= value < math.inf:
        raise UsageError(f"The temperature must be 0 (greedy) or a number from {LOWEST_TEMPERATURE:g}, not {value:g}.")
    return value


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed: bool = False


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Within the block, Ctrl-C sets a flag instead of raising, so the engine can finish its step. A second one
    raises."""
    interrupt = Interrupt()

    def note(signum: int, frame: object) -> None:
        if interrupt.pressed:
            raise KeyboardInterrupt
        interrupt.pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


class TerminalChat:
    """One chat. `run` reads questions and commands until the input ends."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        screen: Screen,
        conversation: Conversation,
        params: SamplingParams,
        *,
        thinking: bool = True,
    ) -> None:
        self.conversation = conversation
        self._engine = engine
        self._tokenizer = tokenizer
        self._screen = screen
        self._params = params
        self._thinking = thinking
        self._effort: str | None = None
        self._thoughts = ""  # of the last answer
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda text: screen.note(HELP),
            "thinking": self._set_thinking,
            "effort": self._set_effort,
            "system": self._set_system,
            "retry": self._retry,
            "undo": self._undo,
            "clear": self._clear,
            "save": lambda text: self._save(_path("save", text)),
            "load": lambda text: self._load(_path("load", text)),
            "temperature": self._set_temperature,
            "max": self._set_max,
            "quit": self._quit,
        }

    def run(self, greeting: str) -> None:
        """Run until the end of the input, or /quit."""
        if self._screen.interactive:
            self._screen.note(greeting)
        while True:
            try:
                self._take(self._screen.read("> "))
            except EOFError:
                self._screen.end_line()
                return
            except KeyboardInterrupt:
                self._screen.note("Press Ctrl-D to end the chat.")
            except Glm5Error as error:
                self._screen.error(str(error))
            except OSError as error:
                self._screen.error(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.")

    def _take(self, line: str) -> None:
        text = line.strip()
        if text.startswith("/") and not text.startswith("//"):
            name, _, argument = text[1:].partition(" ")
            if name not in self._commands:
                raise UsageError(f"Unknown command /{name}{nearest(name, self._commands)}; /help lists the commands.")
            self._commands[name](argument.strip())
        elif text:
            self._ask(line.replace("//", "/", 1) if text.startswith("//") else line)

    def _ask(self, question: str) -> None:
        """Answer a question; after a failure the conversation is as before."""
        before = list(self.conversation.messages)
        self.conversation.messages.append(Message("user", question))
        try:
            while calls := self._answer():
                results = self._results(calls)
                if results is None:
                    self.conversation.messages[-1] = replace(self.conversation.messages[-1], tool_calls=())
                    return
                self.conversation.messages += results
        except BaseException:
            self.conversation.messages = before
            raise

    def _answer(self) -> Sequence[ToolCall]:
        """Generate one assistant message, show it as it grows and append it. Returns the calls that need a result."""
        prompt = self._prompt()
        room = self._engine.max_length - len(prompt.ids)
        if room < 1:
            raise EngineError(
                f"The conversation has {len(prompt.ids)} tokens, the limit is {self._engine.max_length - 1}; shorten "
                "it with /undo or /clear."
            )
        params = replace(
            self._params,
            max_tokens=min(self._params.max_tokens, room),
            stop_token_ids=tuple(self._tokenizer.stop_token_ids),
        )
        began = time.perf_counter()
        reply = self._generate(prompt, params)
        seconds = max(time.perf_counter() - began, 1e-9)
        speed = f"{reply.tokens} tokens, {reply.tokens / seconds:.1f} tokens/s"
        why = {"abort": "; stopped", "length": "; cut off by /max" if params.max_tokens < room else "; context full"}
        self._screen.note(f"{speed}{why.get(reply.finish_reason or '', '')}")
        stopped = reply.finish_reason == "abort"  # then its calls get no results
        calls = [] if stopped else [call["function"] for call in reply.calls]
        called = tuple(ToolCall(call["name"], json.loads(call["arguments"])) for call in calls)
        thoughts = reply.reasoning if prompt.thinking else None
        self.conversation.messages.append(Message("assistant", reply.content, thoughts, called))
        return called

    def _prompt(self) -> Prompt:
        mode = Mode(self._thinking, effort=self._effort)
        return render(self._tokenizer, ChatInput(self.conversation.prompt(), self.conversation.tools, mode))

    def _generate(self, prompt: Prompt, params: SamplingParams) -> Reply:
        (request,) = self._engine.submit(prompt.ids, params)
        reply = Reply(0, self._tokenizer, prompt, (), request.stop_ids)
        done, sent, calls, folded, shown = request.completion, 0, 0, False, ""
        try:
            with interruptible() as interrupt:
                while reply.finish_reason is None:
                    if interrupt.pressed:
                        self._engine.abort(request)
                    else:
                        self._engine.step()
                    ids, logprobs = done.token_ids[sent:], done.logprobs[sent:]
                    sent += len(ids)
                    reason = done.finish_reason if request.done else None
                    deltas = reply.feed(Delta(0, ids, logprobs, [], reason))
                    content = "".join(delta.get("content", "") for delta in deltas)
                    if reply.reasoning and not folded:
                        folded = bool(content or reply.calls or reply.finish_reason)
                        self._show_thinking(reply, folded)
                    self._screen.write(content)
                    shown += content
                    for call in reply.calls[calls:]:
                        self._show_call(call["function"]["name"], call["function"]["arguments"])
                    calls = len(reply.calls)
        finally:
            self._engine.abort(request)
            self._screen.end_line()
        if reply.content != shown:
            self._screen.note("The answer ended inside a tool call, which is kept as text.")
        self._thoughts = reply.reasoning
        return reply

    def _show_thinking(self, reply: Reply, over: bool) -> None:
        if over:
            self._screen.note(f"Thought for {reply.reasoning_tokens} tokens; /thinking shows it.")
        else:
            self._screen.waiting(f"Thinking, {reply.reasoning_tokens} tokens")

    def _show_call(self, name: str, arguments: str) -> None:
        self._screen.end_line()
        values = json.loads(arguments)
        lines = [f"  {key}: {json.dumps(value, ensure_ascii=False, indent=2)}" for key, value in values.items()]
        self._screen.write("\n".join([f"Tool call: {name}", *lines]).replace("\n", "\n  ") + "\n", style="cyan")

    def _results(self, calls: Sequence[ToolCall]) -> list[Message] | None:
        """The results that the user types for the calls; None after Ctrl-C."""
        try:
            return [Message("tool", self._screen.read(f"result of {call.name}> ")) for call in calls]
        except KeyboardInterrupt:
            self._screen.note("The tool calls were dropped.")
            return None

    def _set_thinking(self, text: str) -> None:
        if text == "":
            thoughts = self._thoughts.strip()
            self._screen.note(thoughts or "The last answer has no reasoning.")
            return
        if text not in ("on", "off"):
            raise UsageError(f"/thinking must be on or off, not {text!r:.60}.")
        template = self._tokenizer.chat_format
        if text == "off" and template.always_thinks():
            raise UsageError(f"The template of GLM-{template.version} cannot switch thinking off.")
        self._thinking = text == "on"
        self._screen.note(f"Thinking is {text}.")

    def _set_effort(self, text: str) -> None:
        template = self._tokenizer.chat_format
        efforts = template.efforts()
        if efforts == ():
            raise UsageError(f"The template of GLM-{template.version} has no effort levels.")
        if efforts is not None and text not in efforts:
            raise UsageError(f"/effort must be one of {', '.join(efforts)}, not {text!r:.60}.")
        self._effort = text
        self._screen.note(f"Effort is {text}.")

    def _set_system(self, text: str) -> None:
        self.conversation.system = text
        self._screen.note("The system prompt is set." if text else "There is no system prompt now.")

    def _retry(self, text: str) -> None:
        before = list(self.conversation.messages)
        question = self.conversation.undo()
        if question is None:
            raise UsageError("There is no question to retry yet.")
        try:
            self._ask(question)
        except BaseException:
            self.conversation.messages = before
            raise

    def _undo(self, text: str) -> None:
        question = self.conversation.undo()
        if question is None:
            raise UsageError("There is no question to undo.")
        self._screen.note(f"Removed {question!r:.60}.")

    def _clear(self, text: str) -> None:
        self.conversation.messages.clear()
        self._screen.note("The conversation is empty.")

    def _save(self, path: Path) -> None:
        self.conversation.save(path)
        self._screen.note(f"Saved {len(self.conversation.messages)} messages to {path}.")

    def _load(self, path: Path) -> None:
        self.conversation = Conversation.load(path, self.conversation.tools)
        self._screen.note(f"Loaded {len(self.conversation.messages)} messages from {path}.")

    def _set_temperature(self, text: str) -> None:
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"/temperature must be a number, not {text!r:.60}.") from None
        self._params = replace(self._params, temperature=_temperature(value))
        self._screen.note(f"The temperature is {value:g}.")

    def _set_max(self, text: str) -> None:
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
            raise UsageError(f"/max must be a number of tokens, at least 1, not {text!r:.60}.")
        self._params = replace(self._params, max_tokens=int(text))
        self._screen.note(f"Answers have at most {int(text):,} tokens.")

    def _quit(self, text: str) -> None:
        raise EOFError


def _path(command: str, text: str) -> Path:
    if not text or "\0" in text:
        raise UsageError(f"/{command} needs a file name.")
    return Path(text).expanduser()
