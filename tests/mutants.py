"""Faults put in one at a time, mended ones and others: do the tests still catch each of them?

    python -m tests.mutants
    python -m tests.mutants prompt_cache answers.py     # those whose place has one of these words

Each fault is one expression of one function, in other words. It is put into a copy of the checkout,
where the tests run that should fail. `tests/test_mutants.py` holds that every expression still
stands where this file says: whoever changes such a line says here what the fault would be now.
"""

from __future__ import annotations

import argparse
import ast
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FAILED = 1  # pytest's exit code if tests failed; 2 to 5 say that they did not run


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        place: the file in `ssmlx/`, and the function or class in it; the file alone for a line
            outside of both.
        code: an expression that stands there once.
        instead: what takes its place.
        fault: what goes wrong then.
        tests: what pytest is to run; one of these tests has to fail.
    """

    place: str
    code: str
    instead: str
    fault: str
    tests: str

    @property
    def path(self) -> Path:
        """The file, in the checkout."""
        return Path("ssmlx", self.place.partition(":")[0])

    def apply(self, source: str) -> str:
        """The file's text with the fault; ValueError unless the expression stands there once."""
        lines = source.splitlines(keepends=True)
        first, last = _lines_of(ast.parse(source), self.place.partition(":")[2], len(lines))
        body = "".join(lines[first:last])
        if body.count(self.code) != 1:
            times = body.count(self.code)
            raise ValueError(f"{self.place} has {self.code!r} {times} times, expected once")
        return (
            "".join(lines[:first]) + body.replace(self.code, self.instead) + "".join(lines[last:])
        )


def _lines_of(module: ast.Module, name: str, num_lines: int) -> tuple[int, int]:
    """The first line of a function or class, and the one after it, from 0; all without a name."""
    found: ast.AST = module
    first, last = 0, num_lines
    for part in name.split(".") if name else ():
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        named = [one for one in ast.walk(found) if isinstance(one, kinds) and one.name == part]
        if not named:
            raise ValueError(f"there is no {name}")
        found = named[0]
        first, last = named[0].lineno - 1, named[0].end_lineno or num_lines
    return first, last


MUTANTS = [
    # --- decoding ---
    Mutant(
        "decoding/accept.py:accept",
        ".all(axis=1)",
        ".any(axis=1)",
        "a path counts as accepted if one of its tokens is the target's",
        "tests/test_decoding.py",
    ),
    Mutant(
        "decoding/call.py:decide_and_accept",
        """agreed = model.backbone.broadcast_from_rank0(
        target_tokens, found.path, found.new_tokens, found.num_accepted
    )""",
        "agreed = target_tokens, found.path, found.new_tokens, found.num_accepted",
        "with typical acceptance each rank of a split model accepts by its own rounding",
        "tests/test_ranks.py",
    ),
    Mutant(
        "decoding/call.py:decide_and_accept",
        "if sampler.may_leave_unresolved:",
        "if False:",
        "where a filter may keep more than the candidates, what is given out is no token",
        "tests/test_sampling.py tests/test_drafters.py",
    ),
    Mutant(
        "decoding/call.py:verify_tree",
        "kept_index[accepted.path]",
        "accepted.path",
        "behind pruning, lower layers keep the rows of other nodes than were accepted",
        "tests/test_decoding.py",
    ),
    Mutant(
        "decoding/call.py:stream_rows_of_node",
        "node[:, None] * num_streams",
        "0 * node[:, None]",
        "fused drafting takes the root's streams, whichever node was accepted",
        "tests/test_decoding.py tests/test_drafters.py",
    ),
    Mutant(
        "decoding/loop.py:_SpeculativeLoop.build_ahead",
        "self.cache.restore(before)",
        "pass",
        "an answer's end leaves the cache with the rows of a call that never ran",
        "tests/test_decoding.py",
    ),
    Mutant(
        "decoding/loop.py:_SpeculativeLoop.build_ahead",
        "        del before\n        if",
        "        if",
        "the snapshot is held while the call runs, so each call copies the whole cache",
        "tests/test_launches.py",
    ),
    Mutant(
        "decoding/loop.py:_SpeculativeLoop.build_ahead",
        "follows_unread_drafting=call.is_plain",
        "follows_unread_drafting=False",
        "the first drafted call is charged with drafting that ran before it",
        "tests/test_loop.py",
    ),
    Mutant(
        "decoding/loop.py:_SpeculativeLoop.may_build_ahead",
        "running.is_prompts or ",
        "",
        "the prompt's token waits until the first draft is made",
        "tests/test_launches.py",
    ),
    Mutant(
        "decoding/loop.py:_SpeculativeLoop.build",
        " and not cache.has_uncounted_paths",
        "",
        "a plain call follows a path that is not counted yet",
        "tests/test_decoding.py",
    ),
    Mutant(
        "decoding/loop.py:_SpeculativeLoop.build_ahead",
        """        pending = self.launch(upcoming, follows_unread_drafting=call.is_plain)
        self.commit(call, step)
        yield from self.watch.yield_untimed(step)
""",
        """        self.commit(call, step)
        yield from self.watch.yield_untimed(step)
        pending = self.launch(upcoming, follows_unread_drafting=call.is_plain)
""",
        "the device is idle while the reader holds the tokens of a call",
        "tests/test_launches.py",
    ),
    Mutant(
        "decoding/loop.py:_SpeculativeLoop.build_ahead",
        "        mx.async_eval(tree.arrays)\n",
        "",
        "the device is idle while the host reads a call, as drafting is launched after that",
        "tests/test_launches.py",
    ),
    Mutant(
        "decoding/loop.py:plain_decode",
        """        mx.async_eval(upcoming.arrays_to_read())
        tokens = call.read_tokens()
""",
        """        tokens = call.read_tokens()
        mx.async_eval(upcoming.arrays_to_read())
""",
        "plain decoding waits for each call before it launches the next",
        "tests/test_launches.py",
    ),
    Mutant(
        "decoding/loop.py:_SpeculativeLoop.advance",
        "yields_first = step.part.is_last or running.is_prompts",
        "yields_first = running.is_prompts",
        "a call is launched for an answer that has ended",
        "tests/test_launches.py",
    ),
    Mutant(
        "decoding/loop.py:_SpeculativeLoop.advance",
        "            yields_first = True",
        "            pass",
        "tokens that were read wait until a drafter has processed the text",
        "tests/test_loop.py",
    ),
    Mutant(
        "decoding/loop.py:prefill_in_pieces",
        "size = min(size, until_place - first)",
        "pass",
        "the place that the next turn begins at is passed over, and nothing is kept there",
        "tests/test_loop.py",
    ),
    Mutant(
        "decoding/sampling.py:row_positions",
        "tree.depths[:, None] + 1 + indices(size)",
        "tree.depths[:, None] + indices(size)",
        "penalties do not see a node's own token",
        "tests/test_sampling.py tests/test_drafters.py",
    ),
    Mutant(
        "decoding/sampling.py:Sampling.noise",
        "first + indices(count)",
        "first + 0 * indices(count)",
        "drafts of all levels are made with the first level's noise",
        "tests/test_sampling.py tests/test_drafters.py",
    ),
    Mutant(
        "decoding/sampling.py:Sampling.add_gumbel_noise",
        "positions.first + positions.depths",
        "positions.first + 0 * positions.depths",
        "all nodes of a tree are sampled with the root's noise",
        "tests/test_sampling.py",
    ),
    Mutant(
        "decoding/sampling.py:Sampling._seed",
        "seed ^ (seed >> 32)",
        "seed",
        "seeds that differ in their high 32 bits alone give one text",
        "tests/test_sampling.py tests/test_settings.py",
    ),
    Mutant(
        "decoding/ranking.py:top_columns",
        "if whole < size:",
        "if False:",
        "the last tokens of a vocabulary that is no multiple of the block are never ranked",
        "tests/test_sampling.py tests/test_counts.py",
    ),
    Mutant(
        "decoding/prune.py:transition_logprobs",
        "mx.where(tree.tokens == PAD_TOKEN, -math.inf, logprobs)",
        "logprobs",
        "pruning keeps padding in the place of drafted tokens",
        "tests/test_decoding.py",
    ),
    Mutant(
        "decoding/batch.py:Batch.add",
        "len(row.text) - 1",
        "len(row.text)",
        "in shared calls an answer is sampled with the next position's noise",
        "tests/test_batching.py tests/test_engine.py",
    ),
    Mutant(
        "decoding/batch.py:Batch.remove",
        "rows[:] = [None if one is row else one for one in rows]",
        "pass",
        "an answer that has left a batch gets the tokens of calls under way",
        "tests/test_batching.py tests/test_engine.py",
    ),
    Mutant(
        "decoding/batch.py:Batch._read",
        " or len(row.unread) >= MOST_UNREAD",
        "",
        "an answer that nobody reads is computed to its end, and held",
        "tests/test_batching.py tests/test_engine.py",
    ),
    Mutant(
        "decoding/batch.py:Row.sample",
        "self.tail = positions.tail_at(only)",
        "pass",
        "in shared calls penalties see the prompt's end alone",
        "tests/test_batching.py tests/test_engine.py",
    ),
    # --- generation ---
    Mutant(
        "generation/answer_end.py:StopChecker._add",
        "self.generated == self.max_tokens",
        "self.generated > self.max_tokens",
        "answers are a token longer than they may be",
        "tests/test_stop.py",
    ),
    Mutant(
        "generation/answer_end.py:AnswerText.take_segment",
        "self._text += self._detokenizer.held_back_text()",
        "pass",
        "an answer loses the text that was held back at its end",
        "tests/test_stop.py tests/test_detokenizer.py",
    ),
    Mutant(
        "generation/answer_end.py:AnswerText._held_back",
        "if any(stop.startswith(self._text[-size:]) for stop in self._stop):",
        "if False:",
        "a stop string that comes in several tokens is given out up to its last one",
        "tests/test_stop.py",
    ),
    Mutant(
        "generation/batching.py",
        "STAY = 1.05",
        "STAY = 1.0",
        "answers change between shared calls and turns at each call, where both are as fast",
        "tests/test_batching.py",
    ),
    Mutant(
        "generation/batching.py:Batches._pause_unread",
        "if not group.is_batched:",
        "if True:",
        "an answer that is held and not read keeps the others from their drafts",
        "tests/test_batching.py tests/test_engine.py",
    ),
    Mutant(
        "generation/batching.py:Batches._next_in_line",
        "if self._has_overtaken:",
        "if False:",
        "a long prompt waits for ever while short ones come",
        "tests/test_batching.py",
    ),
    Mutant(
        "generation/pool.py:Holding.claim",
        "self._provided, self._claimed = before",
        "pass",
        "memory that was refused stays claimed",
        "tests/test_pool.py tests/test_engine.py",
    ),
    # --- caches ---
    Mutant(
        "model/cache.py:TreeCache.root_position",
        "position = position + path.count",
        "pass",
        "a call that is built ahead stands at the place of the call before it",
        "tests/test_decoding.py",
    ),
    Mutant(
        "model/cache.py:RowsCache.key_positions",
        "start = start + path.count",
        "start = start + path.length",
        "in layers with a window keys behind an unread path stand too far on",
        "tests/test_model.py tests/test_decoding.py tests/test_families.py",
    ),
    Mutant(
        "model/cache.py:TreeCache.hold_accepted_path",
        "lower_path if layer < split else upper_path",
        "upper_path",
        "behind pruning, lower layers commit the rows of other nodes",
        "tests/test_decoding.py tests/test_model.py",
    ),
    Mutant(
        "model/layer_state.py:AttentionState.copy",
        "copy.copy(buffer)",
        "buffer",
        "what one of two forks writes is seen by the other",
        "tests/test_model.py tests/test_prompt_cache.py tests/test_decoding.py",
    ),
    Mutant(
        "model/layer_state.py:AttentionState.copy_path_rows",
        "key = (id(path), self._step_first, *shape)",
        "key = id(path)",
        "layers of other shapes take rows by the first layer's indices",
        "tests/test_model.py tests/test_decoding.py tests/test_families.py",
    ),
    Mutant(
        "model/state_cache.py:_PendingChain.keep_first",
        "rollback.keep_first(count)",
        "rollback.keep_first(count - 1)",
        "behind a rejected draft a recurrent state lacks the last accepted token",
        "tests/test_recurrent.py",
    ),
    Mutant(
        "model/state_cache.py:StateCache.snapshot",
        "copy.deepcopy((self._caches, self._chain))",
        "copy.deepcopy(self._caches), copy.deepcopy(self._chain)",
        "a fork takes rejected tokens back from caches that are not its own",
        "tests/test_recurrent.py tests/test_prompt_cache.py",
    ),
    Mutant(
        "model/state_cache.py:StateCache.keep_first",
        "if place <= num_tokens",
        "",
        "a mark outlives the text that it stands behind",
        "tests/test_recurrent.py tests/test_prompt_cache.py tests/test_session.py",
    ),
    Mutant(
        "model/recurrent.py:Recurrence.state_after_first",
        "if count == 0:",
        "if False:",
        "a chain of which nothing is kept cannot be taken back",
        "tests/test_recurrent.py",
    ),
    Mutant(
        "prompt_cache/cache.py:_Entry.shared",
        "if key != self.key:",
        "if False:",
        "one model goes on with another model's keys and values",
        "tests/test_prompt_cache.py tests/test_identity.py",
    ),
    Mutant(
        "prompt_cache/cache.py:PromptCache._find",
        "self._pool.mark_used(entry)",
        "pass",
        "the prompt that was used last is the first that leaves the memory",
        "tests/test_prompt_cache.py tests/test_pool.py",
    ),
    Mutant(
        "prompt_cache/cache.py:PromptCache.take",
        "in_file > count",
        "in_file >= count",
        "each turn reads from disk what is in memory",
        "tests/test_prompt_cache.py",
    ),
    Mutant(
        "prompt_cache/prompt_files.py:PromptFolder.find_longest_match",
        "header.key == key and ",
        "",
        "a prompt file of another model is read",
        "tests/test_prompt_cache.py tests/test_identity.py",
    ),
    Mutant(
        "prompt_cache/prompt_files.py:PromptFolder.save",
        "if size > self.max_bytes:",
        "if False:",
        "a prompt larger than the folder may be drives all others out of it",
        "tests/test_prompt_cache.py",
    ),
    # --- answers and their threads ---
    Mutant(
        "answers.py:Answer._keeping_request",
        "if asked.done() and asked.exception() is error:",
        "if True:",
        "a reader that is interrupted loses a segment",
        "tests/test_engine.py tests/test_session.py",
    ),
    Mutant(
        "answers.py:Answer.aclose",
        "await asyncio.shield(asyncio.wrap_future(self.cancel()))",
        "self.cancel()",
        "an answer runs on behind its `async with`",
        "tests/test_engine.py",
    ),
    # --- the model ---
    Mutant(
        "model/masks.py:earlier_streams_mask",
        "(owner[:, None] == owner) & ",
        "",
        "streams see those of other nodes",
        "tests/test_model.py",
    ),
    Mutant(
        "model/masks.py:hide_outside_window",
        "(columns < SINKS) | ",
        "",
        "behind a long text streams do not see its first tokens",
        "tests/test_model.py tests/test_decoding.py",
    ),
    Mutant(
        "model/tree.py:_below_root",
        "(levels <= depths[:, None])",
        "(levels < depths[:, None])",
        "a node's own probability does not count in its path's",
        "tests/test_model.py tests/test_drafters.py",
    ),
    Mutant(
        "model/tree.py:candidate_topology",
        "if total + outscored * (rank + 1) <= size",
        "if total + outscored * (rank + 1) < size",
        "the best tree may lack a node that belongs to it",
        "tests/test_model.py tests/test_drafters.py",
    ),
    Mutant(
        "loading/model_config.py:_require_safe",
        "_require_sizes_in_bounds(path, inner if isinstance(inner, dict) else {})",
        "pass",
        "sizes inside text_config are built however large they are",
        "tests/test_loading.py tests/test_bad_input.py tests/test_security.py",
    ),
    Mutant(
        "loading/identity.py:_sha256_of_stored",
        "left = tensor.end - tensor.begin",
        "left = min(256, tensor.end - tensor.begin)",
        "models that differ in one row count as the same",
        "tests/test_identity.py",
    ),
    Mutant(
        "loading/identity.py:_how_loaded",
        "backbone.origin.dtype, ",
        "",
        "a model goes on with keys and values of another precision",
        "tests/test_identity.py tests/test_prompt_cache.py",
    ),
    # --- drafters ---
    Mutant(
        "drafters/chain.py:ChainRanking.rank",
        "self._recent = mx.concatenate([self._recent[:, 1:], ranked[None, :1]], axis=1)",
        "pass",
        "penalties of an MTP head's chain do not see what it drafted before",
        "tests/test_mtp.py",
    ),
    Mutant(
        "drafters/chain.py:ChainRanking.rank",
        "self._recent = mx.concatenate([self._recent[:, 1:], ranked[None, :1]], axis=1)",
        "pass",
        "penalties of a draft model's chain do not see what it drafted before",
        "tests/test_drafters.py",
    ),
    Mutant(
        "drafters/draft_model.py:DraftModelDrafter.follow",
        "common_prefix_length(chain[:-1], tokens[:-1])",
        "len(tokens) - 1",
        "a draft model goes on behind tokens that were rejected",
        "tests/test_drafters.py tests/test_counts.py",
    ),
    Mutant(
        "drafters/lookup.py:OwnText.start",
        "if self.index.tokens != list(tokens[:known]):",
        "if False:",
        "drafts of a new text are looked up in the one before",
        "tests/test_text_drafts.py tests/test_drafters.py",
    ),
    Mutant(
        "drafters/text_index.py:TextIndex.find_matches",
        "if not is_own and end not in found:",
        "if end not in found:",
        "the end of a text is found as a match of itself",
        "tests/test_text_index.py",
    ),
    Mutant(
        "drafters/text_index.py:TextIndex.tokens_after",
        "tokens[: tokens.index(BOUNDARY)] if BOUNDARY in tokens else tokens",
        "tokens",
        "what follows the end of an earlier answer is drafted as if it went on",
        "tests/test_text_index.py tests/test_text_drafts.py",
    ),
    Mutant(
        "drafters/trie.py:Trie.add",
        "if self.is_full:",
        "if False:",
        "draft trees are larger than they may be",
        "tests/test_drafters.py tests/test_text_drafts.py",
    ),
    Mutant(
        "drafters/stream_drafter.py:StreamDrafter._run_second_pass",
        "verified.position + verified.acceptance.num_accepted",
        "verified.position",
        "streams stand at the place of the call's root, not of its last accepted token",
        "tests/test_decoding.py tests/test_drafters.py tests/test_real.py",
    ),
    # --- the policy ---
    Mutant(
        "policy/controller.py:Controller._may_lose",
        "return self._behind + loss + self._next_entry(one.shape) <= allowed",
        "return True",
        "an answer that accepts nothing goes on drafting, and is slower than plain decoding",
        "tests/test_policy.py",
    ),
    Mutant(
        "policy/controller.py:Controller._choose_probe",
        "if probes and is_parked and self._table.bank >= BANK_MOST:",
        "if False:",
        "where a first timing was wrong, drafting never comes back",
        "tests/test_policy.py",
    ),
    Mutant(
        "policy/costs.py:CostTable.learn_plain_seconds",
        "before = timing.calls if agrees else 0",
        "before = timing.calls",
        "a machine that has become slow is taken for a fast one for many answers",
        "tests/test_policy.py",
    ),
    Mutant(
        "policy/acceptance.py",
        "KEEP_PER_PLAIN_TOKEN = 0.985",
        "KEEP_PER_PLAIN_TOKEN = 1.0",
        "a hard beginning keeps an easy rest from drafts",
        "tests/test_policy.py",
    ),
    # --- text, calls, turns ---
    Mutant(
        "detokenizer.py:Detokenizer.add",
        "if _BYTE.fullmatch(name):",
        "if False:",
        "a character of several byte tokens is given out as replacement characters",
        "tests/test_detokenizer.py",
    ),
    Mutant(
        "formats/arguments.py:argument_value",
        "if kind in allowed and not (is_text_allowed and is_plain):",
        "if kind in allowed:",
        '"10001" becomes a number where a text is allowed',
        "tests/test_formats.py",
    ),
    Mutant(
        "formats/reader.py:AnswerReader._read_call",
        "if not call.is_opened and any(one.name not in self._tools.names for one in calls):",
        "if False:",
        "a text that quotes a call becomes one",
        "tests/test_formats.py",
    ),
    Mutant(
        "formats/history.py:_short_id",
        "text if _ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]",
        "text",
        "Mistral's templates refuse the ids of other clients",
        "tests/test_turns.py tests/test_formats.py",
    ),
    Mutant(
        "turns.py:join_system_turns",
        "_SYSTEM_ROLES",
        "()",
        "templates refuse several system turns, or lose all but the last",
        "tests/test_turns.py",
    ),
    Mutant(
        "turns.py:parse_arguments",
        "if found is None:",
        "if False:",
        "a call without arguments in the history is refused",
        "tests/test_turns.py",
    ),
    Mutant(
        "loading/generation_config.py:sampling_asked_for",
        "if samples is False or (samples is None and not given):",
        "if True:",
        "what a model's generation_config.json says of sampling is not followed",
        "tests/test_generation_config.py",
    ),
    # --- commands and server ---
    Mutant(
        "commands/adapters.py:_existing_run_folder",
        "name in names,",
        "True,",
        "an empty name deletes every adapter",
        "tests/test_commands.py tests/test_adapt_runs.py tests/test_security.py",
    ),
    Mutant(
        "errors.py:without_controls",
        "text.translate(_OBEYED)",
        "text",
        "an answer changes the terminal, or what stands on it",
        "tests/test_terminal.py",
    ),
    Mutant(
        "server/concurrency.py:BodyBytes.part",
        "part.grow_to(0)",
        "pass",
        "bodies that were answered count for ever, and the server refuses all after some time",
        "tests/test_server_load.py tests/test_server.py",
    ),
    Mutant(
        "server/concurrency.py:RequestSlots.close",
        "self._slots.give_back()",
        "pass",
        "a client that leaves early takes a slot with it",
        "tests/test_server.py tests/test_server_load.py tests/test_server_requests.py",
    ),
    Mutant(
        "server/connections.py:BoundedConnection.connection_made",
        "self._start_head_timer()",
        "pass",
        "connections on which nothing comes never end",
        "tests/test_server_connections.py tests/test_server_load.py",
    ),
    Mutant(
        "server/app.py:Routes._admit",
        "return self.handler.prompt_caches[same.index(True)]",
        "return self.handler.prompt_caches[0]",
        "one key's prompts are found by another key's requests",
        "tests/test_server.py tests/test_server_requests.py tests/test_security.py",
    ),
    Mutant(
        "server/app.py:_is_known",
        "return address.lower() in hosts or urlsplit(address).hostname in hosts",
        "return True",
        "a page of another site can ask the server in a user's browser",
        "tests/test_server.py tests/test_security.py",
    ),
]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("words", nargs="*", help="take mutants whose place has one of these")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default: 2)")
    args = parser.parse_args(argv)
    chosen = [one for one in MUTANTS if not args.words or any(w in one.place for w in args.words)]
    with tempfile.TemporaryDirectory(prefix="ssmlx-mutants-") as name:
        copies = queue.SimpleQueue[Path]()
        for number in range(min(args.jobs, len(chosen))):
            copies.put(_copy_checkout(Path(name, str(number))))
        with ThreadPoolExecutor(args.jobs) as pool:
            survived = [
                mutant
                for mutant, is_caught in zip(
                    chosen, pool.map(partial(_try, copies=copies), chosen), strict=True
                )
                if not is_caught
            ]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} are caught")
    return 1 if survived else 0


def _copy_checkout(to: Path) -> Path:
    """Copy what git tracks, and what it would, as it is now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    kept = ROOT / ".pytest_cache" / "kept"  # the real model, if it was fetched
    if kept.exists():
        (to / ".pytest_cache").mkdir()
        (to / ".pytest_cache" / "kept").symlink_to(kept)
    return to


def _try(mutant: Mutant, copies: queue.SimpleQueue[Path]) -> bool:
    """Run a fault's tests in a copy that nobody else uses now; returns whether any fails."""
    copy = copies.get()
    source = (copy / mutant.path).read_text()
    started = time.monotonic()
    try:
        (copy / mutant.path).write_text(mutant.apply(source))
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *mutant.tests.split()],
            cwd=copy,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    finally:
        (copy / mutant.path).write_text(source)
        copies.put(copy)
    seconds = time.monotonic() - started
    found = {_FAILED: "caught", 0: "SURVIVED"}.get(done.returncode, "DID NOT RUN")
    by = next((one[7:] for one in done.stdout.splitlines() if one.startswith("FAILED ")), "")
    print(f"{found:8} {seconds:4.0f} s  {mutant.place}: {mutant.fault}", flush=True)
    print(f"         {by.partition(' - ')[0]}" if by else done.stdout[-300:], flush=True)
    return done.returncode == _FAILED


if __name__ == "__main__":
    sys.exit(main())
