"""Take one guard away at a time, and see the drill miss the bound that the guard is for.

Each mutant is a copy of the source with one change; a fault that keeps its bounds there, or cannot
be injected, is no test of that guard. Ends with 1 when a mutant survives. Takes about a quarter of
a minute each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


from drill.gpu import missing
from drill.judging import NOT_STARTED

ROOT: Final = Path(__file__).resolve().parents[2]
ROOMS: Final = ("ppstream", "kernels", "stages", "tools")
LIMIT_S: Final = 300


@dataclass(frozen=True)
class Mutant:
    """``old`` occurs once in ``file``; with ``new`` instead, ``fault`` must miss its bound."""

    guard: str
    file: str
    old: str
    new: str
    fault: str
    needs_gpus: bool = False


MUTANTS: Final = (
    Mutant(
        "the gate asks the times alone",
        "ppstream/analysis/verdict.py",
        "    if alone is not None and s_alone is not None and s_alone < gate.overlap_min:\n",
        "    if False:\n",
        "shared-lock",
    ),
    Mutant(
        "a wait for a CPU alone is no work",
        "ppstream/analysis/contention.py",
        "    return _Parts(cpu, delay, _each(sub, most, delay))\n",
        "    return _Parts(cpu, delay, most)\n",
        "lock-beside-others",
    ),
    Mutant(
        "no time alone counts beyond the run's",
        "ppstream/analysis/contention.py",
        "    counts = _each(add, _each(min, cpu, ran.cpu), _each(min, rest, ran.rest))\n",
        "    counts = _each(add, cpu, rest)\n",
        "slower-alone",
    ),
    Mutant(
        "service is judged beside bring-up",
        "ppstream/analysis/judge.py",
        "    reasons = _service_reasons(run, ready, lease) | _lost_lines(run)\n",
        "    reasons = _lost_lines(run)\n",
        "worse-service",
    ),
    Mutant(
        "the run's own verdict is compared",
        "ppstream/analysis/verdict.py",
        "    event = logged_verdict(run, window)\n    if event is not None:\n",
        "    event = logged_verdict(run, window)\n    if event is not None and False:\n",
        "forged-folder",
    ),
    Mutant(
        "a silent peer counts as frozen",
        "ppstream/control/peer.py",
        "        if now_ns - self.last_heard_ns <= frozen_ns:\n",
        "        if frozen_ns:\n",
        "freeze-policy-rank",
    ),
    Mutant(
        "the survivor ends a frozen process",
        "ppstream/launch/rank_exit.py",
        "            process.end_with_stacks()\n",
        "",
        "freeze-rank-0",
    ),
    Mutant(
        "the watchdog looks",
        "ppstream/control/watchdog.py",
        "            self.check()\n",
        "",
        "policy-never-ends",
    ),
    Mutant(
        "each thread of the loop has a mark",
        "ppstream/pipeline/split_executor.py",
        "        loop.marks = (loop.mark, *self._marks.values())\n",
        "",
        "decode-thread-never-ends",
    ),
    Mutant(
        "unusable results in a row end the run",
        "ppstream/pipeline/stage_c.py",
        "            if self._unusable_in_a_row >= self._errors_max:\n",
        "            if self._errors_max < 0:\n",
        "policy-keeps-giving-nan",
    ),
    Mutant(
        "outputs are filled before each call",
        "ppstream/policy/unwritten.py",
        "            memory[:] = pattern\n",
        "            pass\n",
        "policy-writes-nothing-once",
    ),
    Mutant(
        "what is left of the fill is looked for",
        "ppstream/policy/unwritten.py",
        "            if probe.finds() and (text := probe.text(present)):\n                raise",
        '            if probe.finds() and (text := ""):\n                raise',
        "policy-writes-half-once",
    ),
    Mutant(
        "what a policy raises is one failed envelope, an Exception or not",
        "ppstream/pipeline/host_policy_rank.py",
        "        except BaseException as error:  # noqa: BLE001 - user code: one",
        "        except Exception as error:  # noqa: BLE001 - user code: one",
        "policy-raises-oddly",
    ),
    Mutant(
        "a text that raises is shown all the same",
        "ppstream/core/user_code.py",
        "    except BaseException as failure:  # noqa: BLE001 - sys.exit() in a __str__, too\n",
        "    except ZeroDivisionError as failure:\n",
        "policy-raises-oddly",
    ),
    Mutant(
        "an exit in a policy is an end that says so",
        "ppstream/core/user_code.py",
        "    if is_a(error, SystemExit):\n",
        "    if is_a(error, ZeroDivisionError):\n",
        "policy-calls-exit",
    ),
    Mutant(
        "an exit in a decoder, too",
        "ppstream/pipeline/stage_c.py",
        "        except BaseException as error:  # noqa: BLE001 - user code: one",
        "        except Exception as error:  # noqa: BLE001 - user code: one",
        "decoder-calls-exit",
    ),
    Mutant(
        "the gate names a disk that is full",
        "ppstream/pipeline/bringup.py",
        "    if report.exit_code:\n        check_disk(rank0, run)\n",
        "",
        "disk-full-in-bring-up",
    ),
    Mutant(
        "and the policy rank's",
        "ppstream/pipeline/policy_rank.py",
        "Measured(durations_ns, self.log.statistics().refused)",
        "Measured(durations_ns)",
        "disk-full-in-bring-up",
    ),
    Mutant(
        "an allocation that failed on the CPU is memory",
        "ppstream/core/user_code.py",
        " or CPU_MEMORY in message",
        "",
        "policy-out-of-memory",
    ),
    Mutant(
        "the rank that failed first is named",
        "ppstream/launch/rank_exit.py",
        "(told := self.print_first_failure(code))",
        '(told := "")',
        "kill-policy-rank",
    ),
    Mutant(
        "SIGUSR1 cuts the epoch",
        "ppstream/launch/run_rank0.py",
        "    end.pass_cuts_to(rank0.request_cut)\n",
        "",
        "cut-by-operator",
    ),
    Mutant(
        "a clock that jumped starts anew",
        "ppstream/ingest/stamp_filter.py",
        "        if self._rejected < JUMP_SAMPLES:\n",
        "        if self._rejected:\n",
        "clock-jumps-forward",
    ),
    Mutant(
        "a full disk stops no log thread",
        "ppstream/observe/log_writer.py",
        "        except OSError as error:  # disk",
        "        except ZeroDivisionError as error:  # disk",
        "disk-full",
    ),
    Mutant(
        "hearts beat while idle",
        "ppstream/control/heartbeat.py",
        "                    self._heart.offer(rank_messages.Heartbeat(self._progress()))\n",
        "                    self._progress()\n",
        "idle",
    ),
    Mutant(
        "the other rank's process is watched, not its sockets alone",
        "ppstream/control/heartbeat.py",
        "            poll.register(self._process.fileno(), select.POLLIN)\n",
        "            pass\n",
        "kill-policy-rank-that-forked",
    ),
    Mutant(
        "what a dead rank has forked is ended",
        "ppstream/launch/rank_exit.py",
        "        forks = _end_all(of_rank(rank, os.environ, others))\n",
        "        forks = [*others][:0]\n",
        "kill-policy-rank-that-forked",
    ),
    Mutant(
        "the launcher is watched",
        "ppstream/launch/lookout.py",
        "                self._on_launcher_gone()\n",
        "                pass\n",
        "launcher-killed",
    ),
    Mutant(
        "a start that stands is watched",
        "ppstream/launch/course.py",
        "ProgressMark(thread, lambda: self._step).__enter__()",
        "ProgressMark(thread, lambda: self._step)",
        "build-never-ends",
    ),
    Mutant(
        "a run that goes on is not deleted",
        "ppstream/observe/run_folder.py",
        "    except BlockingIOError:\n        return True\n",
        "    except BlockingIOError:\n        return False\n",
        "log-kept-while-it-runs",
    ),
    Mutant(
        "a launcher is known by more than its number",
        "ppstream/observe/run_folder.py",
        '"launcher_start": start_time(pid)',
        '"launcher_start": 1',
        "launcher-number-again",
    ),
    Mutant(
        "ranks compare what they resolved",
        "ppstream/launch/handshake.py",
        "    if lines:\n",
        "    if lines is None:\n",
        "ranks-differ",
    ),
    Mutant(
        "sensors are looked at",
        "ppstream/pipeline/rank0.py",
        "            look(now)\n",
        "            pass\n",
        "values-stuck",
    ),
    Mutant(
        "an open network must be declared",
        "ppstream/launch/placement.py",
        "    if not link.trusted_network:\n",
        "    if link is None:\n",
        "untrusted-network",
    ),
    Mutant(
        "a link that refuses has a code of its own",
        "ppstream/cuda/driver.py",
        "    exit_code = ExitCode.POISONED\n",
        "",
        "link-refuses",
    ),
    Mutant(
        "who answers scrapers waits for none of them",
        "ppstream/observe/http_server.py",
        "            accepted.settimeout(0)\n",
        "",
        "scraper-silent",
    ),
    Mutant(
        "a drain ends when its time is over",
        "ppstream/sessions/table.py",
        "DRAIN_NS: Final = NS_PER_MS",
        "DRAIN_NS: Final = 10**9",
        "flood-strangers",
    ),
    Mutant(
        "frames have a limit by the second",
        "ppstream/sessions/server.py",
        "        if left < 0 and (",
        "        if left == 1 << 62 and (",
        "flood-decreasing",
    ),
    Mutant(
        "a robot that was told to stop executes nothing",
        "ppstream/robot/control_loop.py",
        "        if self._stopped is not None:\n",
        "        if self._stopped is self:\n",
        "emergency-stop",
    ),
    Mutant(
        "no receiving thread ends in silence",
        "ppstream/robot/connection.py",
        "BLE001 - the top of a thread: its users raise it\n            self._fail(error)\n",
        "BLE001 - the top of a thread: its users raise it\n            pass\n",
        "callback-raises",
    ),
    Mutant(
        "what the driver refuses ends the rank",
        "ppstream/cuda/driver.py",
        "    exit_code = ExitCode.POISONED\n",
        "",
        "policy-reads-beyond-memory",
        needs_gpus=True,
    ),
    Mutant(
        "a stuck rank leaves NCCL's flight recorder",
        "ppstream/launch/run_rank0.py",
        "        end.save_nccl_dump(error.exit_code)\n",
        "",
        "stage-b-never-ends-nccl",
        needs_gpus=True,
    ),
)


def main() -> int:
    """Run every mutant, or those whose fault is given; 0 when none survives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="FAULT", help="mutants of these faults")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if args.only is None or m.fault in args.only]
    if (why := missing()) and (skipped := [m for m in chosen if m.needs_gpus]):
        print(f"skipped: {len(skipped)} mutants: {why}")
        chosen = [m for m in chosen if m not in skipped]
    survivors = [mutant for mutant in chosen if _survives(mutant)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} guards are tested by their fault")
    return 1 if survivors else 0


def _survives(mutant: Mutant) -> bool:
    """True when the fault keeps its bounds without the guard."""
    with tempfile.TemporaryDirectory(prefix="ppstream-mutant-") as name:
        copy = Path(name)
        for room in ROOMS:
            shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times")
        path.write_text(text.replace(mutant.old, mutant.new))
        rooms = [str(copy / room) for room in (".", "kernels", "stages", "tools")]
        rooms += filter(None, [os.environ.get("PYTHONPATH")])  # what is not installed but found
        env = os.environ | {"PYTHONPATH": os.pathsep.join(rooms)}
        env["PPSTREAM_NATIVE"] = "0"  # the compiled core would pass a mutant of its twin by
        command = [
            sys.executable,
            str(copy / "tools/drill/fault_drill.py"),
            "--only",
            mutant.fault,
        ]
        command += ["--gpu"] if mutant.needs_gpus else []
        ended = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True, timeout=LIMIT_S
        )
    missed = [line.strip() for line in ended.stdout.splitlines() if "missed:" in line]
    survived = not missed or NOT_STARTED in missed[0]  # else the copy is broken, not its guard
    reason = missed[0][:110] if missed else (ended.stdout + ended.stderr)[-400:]
    state = "SURVIVED" if survived else "caught  "
    print(f"{state} without: {mutant.guard} ({mutant.fault}): {reason}")
    sys.stdout.flush()
    return survived


if __name__ == "__main__":
    sys.exit(main())
