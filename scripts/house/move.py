# ruff: noqa: E501, C408, RUF059
"""Moves every module to its place, once: `python scripts/house/move.py CLONE`, in a clone; needs libcst.

places.txt   below src/paceline, where each module goes; `~` is src/paceline_bench; two to one place are merged
tests.txt    where each test goes
rooms_test.py   what tests/laws/test_rooms.py is then

Imports, uses of module names, and dotted names and paths in strings, comments and pages are rewritten. Then `finish`
mends what a program cannot see: code in strings, paths of data, patched attributes. What is left: `ruff check --fix`,
`ruff format`, five lines that are too long, `python scripts/write_tree.py`. This folder goes with the commit that moves.
"""

import ast
import collections
import re
import shutil
import subprocess
import sys
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, QualifiedNameProvider, QualifiedNameSource

HERE = Path(__file__).resolve().parent
REPO = Path(sys.argv[1]).resolve()
OLDROOT = REPO / "src/paceline"
paths = dict(line.split() for line in (HERE / "places.txt").read_text().splitlines())
paths = {old: new for old, new in paths.items() if (OLDROOT / old).exists()}


def dot(path):
    """of a path below src/paceline, or ~ of paceline_bench"""
    top, rest = ("paceline_bench", path[1:]) if path.startswith("~") else ("paceline", path)
    parts = [top, *Path(rest).with_suffix("").parts]
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


NEW = {dot(o): dot(n) for o, n in paths.items()}
# packages that go
for o, n in {
    "paceline.probe": "paceline.planner",
    "paceline.models": "paceline.train.models",
    "paceline.bench": "paceline_bench",
    "paceline.bench.chaos": "paceline_bench.chaos",
    "paceline.bench.cluster": "paceline_bench.cluster",
    "paceline.bench.simulated": "paceline_bench.simulated",
}.items():
    NEW[o] = n
MODULES = set(NEW)
notes = []


def base(d):
    return d.rpartition(".")[2]


def package(d):
    return d.rpartition(".")[0]


DOTTED = re.compile(r"(?<![\w./-])paceline((?:\.\w+)+)")


def in_text(text):
    def one(match):
        parts = ("paceline" + match[1]).split(".")
        for k in range(len(parts), 1, -1):
            name = ".".join(parts[:k])
            if name in NEW:
                return ".".join([NEW[name], *parts[k:]])
        return match[0]

    text = DOTTED.sub(one, text)

    def path(match):
        prefix, rel = match[1] or "", match[2]
        if rel in paths and ("/" in rel or prefix):
            new = paths[rel]
            if new.startswith("~"):
                return ("src/paceline_bench/" if prefix.startswith("src") else "paceline_bench/") + new[1:]
            return prefix + new
        return match[0]

    return re.sub(r"(?<![\w/.-])((?:src/)?paceline/)?((?:\w+/)*\w+\.py)\b", path, text)


def expr(dotted):
    parts = dotted.split(".")
    node = cst.Name(parts[0])
    for p in parts[1:]:
        node = cst.Attribute(node, cst.Name(p))
    return node


def name_of(node):
    if node is None:
        return ""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        return name_of(node.value) + "." + node.attr.value
    return "?"


class Mover(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self, where, taken):
        self.where, self.taken = where, taken
        self.imports = 0
        self.keywords = set()
        self.alias = {}  # old dotted -> local name to use

    def visit_Arg(self, node):
        if node.keyword:
            self.keywords.add(id(node.keyword))

    def visit_Import(self, node):
        self.imports += 1

    def visit_ImportFrom(self, node):
        self.imports += 1

    def leave_Import(self, node, updated):
        self.imports -= 1
        names = []
        for a in updated.names:
            d = name_of(a.name)
            names.append(a.with_changes(name=expr(NEW[d])) if d in NEW else a)
        return updated.with_changes(names=names)

    def leave_ImportFrom(self, node, updated):
        self.imports -= 1
        return updated

    def local(self, old):
        """How the module is called here."""
        new = NEW[old]
        if base(new) == base(old):
            return base(old), None
        if base(new) in self.taken:
            notes.append(f"{self.where}: {base(new)} is taken; import {new} as {base(old)}")
            return base(old), base(old)
        return base(new), None

    def leave_SimpleStatementLine(self, node, updated):
        if len(updated.body) != 1 or not isinstance(updated.body[0], cst.ImportFrom):
            return updated
        stmt = updated.body[0]
        if stmt.relative or isinstance(stmt.names, cst.ImportStar):
            return updated
        module = name_of(stmt.module)
        if not (module == "paceline" or module.startswith("paceline.")):
            return updated
        groups = collections.OrderedDict()
        for a in stmt.names:
            full = f"{module}.{a.name.value}"
            if full in MODULES:
                target = package(NEW[full])
                local, forced = self.local(full)
                asname = a.asname
                if forced and not asname:
                    asname = cst.AsName(cst.Name(forced))
                new = cst.ImportAlias(name=cst.Name(base(NEW[full])), asname=asname)
            else:
                target, new = NEW.get(module, module), cst.ImportAlias(name=a.name, asname=a.asname)
            groups.setdefault(target, []).append(new)
        lines = []
        for i, (target, aliases) in enumerate(groups.items()):
            parens = dict(lpar=cst.LeftParen(), rpar=cst.RightParen()) if len(aliases) > 3 else {}
            s = cst.ImportFrom(module=expr(target), names=aliases, **parens)
            lines.append(
                cst.SimpleStatementLine(
                    [s],
                    leading_lines=updated.leading_lines if i == 0 else [],
                    trailing_whitespace=updated.trailing_whitespace,
                )
            )
        return cst.FlattenSentinel(lines)

    def leave_Name(self, node, updated):
        if self.imports or id(node) in self.keywords:
            return updated
        for q in self.get_metadata(QualifiedNameProvider, node, None) or ():
            if q.source is QualifiedNameSource.IMPORT and q.name in MODULES and node.value == base(q.name):
                return updated.with_changes(value=self.local(q.name)[0])
        return updated

    def leave_Attribute(self, node, updated):
        d = name_of(node)
        if d.startswith("paceline.") and d in NEW and not self.imports:
            return expr(NEW[d])
        return updated

    def leave_SimpleString(self, node, updated):
        return updated.with_changes(value=in_text(updated.value))

    def leave_FormattedStringText(self, node, updated):
        return updated.with_changes(value=in_text(updated.value))

    def leave_Comment(self, node, updated):
        return updated.with_changes(value=in_text(updated.value))


def taken_in(source):
    """Every name bound in it but those of methods, imports of moved modules left out."""
    found = set()
    tree = ast.parse(source)
    methods = {id(f) for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body}
    for n in ast.walk(tree):
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
            found.add(n.id)
        elif isinstance(n, ast.arg):
            found.add(n.arg)
        elif isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and id(n) not in methods:
            found.add(n.name)
        elif isinstance(n, ast.Import):
            found |= {(a.asname or a.name).split(".")[0] for a in n.names}
        elif isinstance(n, ast.ImportFrom):
            for a in n.names:
                if f"{n.module}.{a.name}" not in MODULES:
                    found.add(a.asname or a.name)
    return found


def transform(path):
    source = path.read_text()
    if "paceline" not in source and not path.is_relative_to(OLDROOT):
        return source
    taken = taken_in(source)
    # names that are used as modules themselves do not take their own new name
    tree = MetadataWrapper(cst.parse_module(source))
    return tree.visit(Mover(path.relative_to(REPO), taken)).code


def sh(*words):
    subprocess.run(words, cwd=REPO, check=True)


def head_and_body(source):
    """(docstring, import lines, the rest)"""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    doc = ast.get_docstring(tree, clean=False) or ""
    start = tree.body[0].end_lineno if doc else 0
    end = start
    for n in tree.body[1 if doc else 0 :]:
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            end = n.end_lineno
        else:
            break
    return doc, "".join(lines[start:end]), "".join(lines[end:])


def tops(source):
    out = set()
    for n in ast.parse(source).body:
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)):
            out.add(n.name)
        elif isinstance(n, ast.Assign):
            out |= {t.id for x in n.targets for t in ast.walk(x) if isinstance(t, ast.Name)}
        elif isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name):
            out.add(n.target.id)
    return out


def main():
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    py = [REPO / t for t in tracked if t.endswith(".py")]
    texts = {p: transform(p) for p in py}
    for p, t in texts.items():
        if t != p.read_text():
            p.write_text(t)
    for t in tracked:
        if (
            t
            and not t.endswith(".py")
            and (
                t.startswith("docs/")
                or t in ("README.md", "Makefile", "pyproject.toml", "SECURITY.md", ".ci/run")
                or t.endswith(".toml")
            )
        ):
            if t.startswith("benchmarks/20"):
                continue
            p = REPO / t
            old = p.read_text()
            new = in_text(old)
            if new != old:
                p.write_text(new)
    # moves
    by_new = collections.defaultdict(list)
    for o, n in paths.items():
        by_new[n].append(o)
    for n, olds in by_new.items():
        target = REPO / "src" / ("paceline_bench/" + n[1:] if n.startswith("~") else "paceline/" + n)
        target.parent.mkdir(parents=True, exist_ok=True)
        first = next((o for o in olds if o in PRIMARY), olds[0])
        if (OLDROOT / first) != target:
            tmp = target.with_suffix(".moving")
            sh("git", "mv", str(OLDROOT / first), str(tmp))
    for n in by_new:
        target = REPO / "src" / ("paceline_bench/" + n[1:] if n.startswith("~") else "paceline/" + n)
        tmp = target.with_suffix(".moving")
        if tmp.exists():
            sh("git", "mv", str(tmp), str(target))
    for n, olds in by_new.items():
        if len(olds) == 1:
            continue
        target = REPO / "src" / ("paceline_bench/" + n[1:] if n.startswith("~") else "paceline/" + n)
        first = next((o for o in olds if o in PRIMARY), olds[0])
        source = target.read_text()
        doc, imports, body = head_and_body(source)
        me = dot(n)
        for o in olds:
            if o == first:
                continue
            other = (OLDROOT / o).read_text()
            if clash := tops(source) & tops(other):
                notes.append(f"MERGE {o} -> {n}: both define {clash}")
            d2, i2, b2 = head_and_body(other)
            doc = doc.rstrip() + ("\n\n" + d2.strip() + "\n" if d2 else "")
            imports += i2.replace("from __future__ import annotations\n", "")
            body = body.rstrip("\n") + "\n\n\n" + b2.lstrip("\n")
            sh("git", "rm", "-q", "-f", str(OLDROOT / o))
        if f"from {me} import" in imports or f"from {package(me)} import {base(me)}" in imports:
            notes.append(f"MERGE {n} imports itself")
            imports = re.sub(rf"from {re.escape(me)} import (\([^)]*\)|[^\n]*)\n", "", imports)
        target.write_text(
            f'"""{doc.rstrip()}\n"""\n'.replace('\n"""\n', '"""\n') + imports + body
            if "\n" not in doc.strip()
            else f'"""{doc.rstrip()}\n"""\n' + imports + body
        )
    print("\n".join(notes))


PRIMARY = {
    "frozen.py",
    "control.py",
    "exchange/meeting.py",
    "values.py",
    "engine/ahead.py",
    "engine/numerics.py",
    "packing.py",
    "world.py",
    "probe/examine.py",
    "data/journal.py",
    "engine/randomness.py",
    "engine/inputs.py",
    "engine/rows.py",
    "engine/crew.py",
    "engine/cores.py",
    "link/library.py",
    "link/words.py",
    "link/cable.py",
    "link/mesh.py",
    "link/collectives/ring.py",
    "whereabouts.py",
    "probe/teams.py",
    "probe/trial.py",
    "probe/wire.py",
    "launch/lines.py",
    "report/chart.py",
    "report/facts.py",
    "tracing.py",
    "link/late.py",
    "bench/contender.py",
    "bench/hostile.py",
    "bench/duel.py",
    "bench/cluster/namespaces.py",
    "bench/cluster/race.py",
}


DOCS = {
    "paceline/checkpoint": "What a run saves and resumes from: whole or not there, checked by hashes, read by any number of nodes.",
    "paceline/engine/checks": "What a model, a loss or an optimizer is refused or reported for, at `join` or in the first steps.",
    "paceline/engine/compute": "How one process computes: forward, backward, the optimizer's step, and their state.",
    "paceline/engine/node": "What the processes of one node share: memory, sums of gradients, the optimizer's work, cores.",
    "paceline/exchange/flow": "How gradients leave and arrive: send queue and order, autotuner, cost model, control messages.",
    "paceline/launch/deploy": "The working tree and its data on other hosts: what changed is sent.",
    "paceline/launch/doctor": "What is wrong with hosts, links, clocks and ports, each with its remedy.",
    "paceline/launch/supervise": "Processes that a launcher watches: restarts, exit notes, a launcher that takes another one's place.",
    "paceline/link/net": "How nodes find each other and talk: rendezvous, authentication, framing, routes, TLS.",
    "paceline/planner/measure": "What is measured of a job and of a network, by trial.",
    "paceline/planner/diagnose": "Why N processes are not one: experiments, causes, remedies.",
    "paceline/report/page": "The report: one page of HTML from a record.",
    "paceline/train": "`paceline train`: networks by name, their settings, learning rates and data.",
    "paceline_bench/single": "Benchmarks of one machine.",
}


def sub(path, *pairs):
    file = REPO / path
    text = file.read_text()
    for old, new in pairs:
        if old not in text:
            print(f"{path}: {old[:60]!r} is not there")
        text = text.replace(old, new)
    file.write_text(text)


def git(*words):
    sh("git", *words)


def finish():
    for folder, text in DOCS.items():
        file = REPO / "src" / folder / "__init__.py"
        if not file.exists():
            file.write_text(f'"""{text}"""\n')
    git("mv", "src/paceline/sample", "src/paceline/train/sample")
    git("mv", "src/paceline/report/page.css", "src/paceline/report/page/page.css")
    git("mv", "src/paceline/report/page.js", "src/paceline/report/page/page.js")
    sub(
        "src/paceline/report/page/page.py",
        ('resources.files("paceline.report")', 'resources.files("paceline.report.page")'),
    )
    sub(
        "src/paceline/manual_loop.py",
        (
            "from paceline.engine.compute import batch as batches\n",
            "from paceline.engine.compute.batch import mapped, samples\n",
        ),
        ("batches.mapped", "mapped"),
        ("batches.samples", "samples"),
    )
    sub(
        "src/paceline/registry.py",
        (
            '"models": "build"}\n',
            '"models": "build"}\nPLACES = {"models": "train.models"}  # of rooms that lie inside of others\n',
        ),
        ('find_spec(f"paceline.{room}")', 'find_spec(f"paceline.{PLACES.get(room, room)}")'),
        ('import_module(f"paceline.{room}.{name}")', 'import_module(f"paceline.{PLACES.get(room, room)}.{name}")'),
    )
    sub(
        "src/paceline/data/sample.py",
        ('files("paceline") / "sample"', 'files("paceline.train") / "sample"'),
        ("paceline/sample/README.md", "paceline/train/sample/README.md"),
    )
    sub("scripts/make_sample.py", ('"paceline" / "sample"', '"paceline" / "train" / "sample"'))
    sub("pyproject.toml", ('"sample/*", "report/page.*"', '"train/sample/*", "report/page/page.*"'))
    sub("src/paceline/elastic/consistency.py", ("Path(__file__).parent\n", "Path(__file__).parents[1]\n"))
    # code in strings
    sub(
        "src/paceline/planner/verify.py",
        ("from paceline import verify; verify", "from paceline.planner import verify; verify"),
    )
    node = (
        "from paceline.launch import node; sys.exit(node.",
        "from paceline.launch import node_agent; sys.exit(node_agent.",
    )
    sub("src/paceline/launch/ssh.py", node)
    sub(
        "src/paceline/launch/supervise/restart_policy.py",
        ("(`paceline.launch.supervise.process_status`)", "(`process_status`)"),
    )
    sub(
        "src/paceline/report/page/summary.py",
        ("import bars, summary\n", "import bars\n"),
        ("summary.told(run)", "told(run)"),
    )


PATH = "Path(__file__)"
IN_TESTS = (
    (PATH + ".resolve().parents[1]", PATH + ".resolve().parents[2]"),
    (PATH + ".resolve().parent.parent", PATH + ".resolve().parents[2]"),
    (PATH + ".parent.parent", PATH + ".parents[2]"),
    (PATH + ".parent ", PATH + '.parents[1] / "support" '),
    (PATH + ".parent\n", PATH + '.parents[1] / "support"\n'),
)


def move_tests():
    for line in (HERE / "tests.txt").read_text().splitlines():
        old, new = line.split()
        if not (REPO / old).exists():
            continue
        (REPO / new).parent.mkdir(exist_ok=True)
        if Path(old).name.startswith("test_"):
            text = (REPO / old).read_text()
            for before, after in IN_TESTS:
                text = text.replace(before, after)
            (REPO / old).write_text(text)
        git("mv", old, new)
    git("mv", "tests/scripts", "tests/support/scripts")
    shutil.copy(HERE / "rooms_test.py", REPO / "tests/laws/test_rooms.py")
    sub("pyproject.toml", ('pythonpath = ["tests", "benchmarks"]', 'pythonpath = ["tests/support", "benchmarks"]'))
    sub("pyproject.toml", ('src = ["src", "tests"]', 'src = ["src", "tests/support", "benchmarks"]'))
    sub(".ci/run", ("tests/needs.py", "tests/support/needs.py"))
    folders = "\n# a file of laws may use the cases of another\nsys.path += [str(path) for path in sorted(Path(__file__).parent.iterdir()) if path.is_dir()]\n"
    sub(
        "tests/conftest.py",
        ("import needs\n", "import needs\n" + folders),
        ("import signal\n", "import signal\nimport sys\n"),
    )
    sub("tests/conftest.py", ("import Iterator\n", "import Iterator\nfrom pathlib import Path\n"))
    sub("tests/session/test_commands.py", ("HERE.parent /", "HERE.parents[1] /"))
    all_of = "PATH = os.pathsep.join(str(path) for path in (HERE, *sorted(HERE.parent.iterdir())) if path.is_dir())\n"
    sub("tests/support/launching.py", ("HERE = Path(__file__).parent\n", "HERE = Path(__file__).parent\n" + all_of))
    sub("tests/support/launching.py", ('f"{HERE}{os.pathsep}', 'f"{PATH}{os.pathsep}'))
    sub("tests/engine/test_what_forward_changes.py", ("[str(HERE), *os", "[str(HERE), str(Path(__file__).parent), *os"))
    # code in strings, patched attributes, paths
    node = (
        "from paceline.launch import node; sys.exit(node.",
        "from paceline.launch import node_agent; sys.exit(node_agent.",
    )
    sub("tests/elastic/test_hung_up.py", node)
    sub(
        "tests/launch/test_ssh_checks.py",
        ("import local, node; ", "import local, node_agent; "),
        ("exit(node.main", "exit(node_agent.main"),
    )
    sub(
        "tests/laws/test_plan_explains.py",
        (
            "from paceline import plan; plan.survey(); plan.",
            "from paceline.planner import planner; planner.survey(); planner.",
        ),
    )
    sub(
        "tests/engine/test_heap_is_kept.py",
        ("from paceline.engine import heap", "from paceline.engine.node import affinity"),
        ("heap.keep()", "affinity.keep()"),
    )
    sub(
        "tests/report/test_track_tells_everything.py",
        ("import track; print(track.", "import trackers; print(trackers."),
    )
    sub(
        "tests/launch/test_restarts.py",
        ("\nfrom paceline import status\n", "\nfrom paceline.launch.supervise import process_status as status\n"),
    )
    sub("tests/launch/test_outlet.py", ("import outlet\n", "import output\n"), ("outlet.", "output."))
    sub(
        "tests/laws/test_clock_is_honest.py",
        (
            "from paceline.planner import clock\nfrom waiting",
            "from paceline.planner.measure import stopwatch as clock\nfrom waiting",
        ),
    )
    sub(
        "tests/checkpoint/test_checkpoint_damage.py",
        (
            '[*sorted((SRC / "elastic").glob("*.py")), SRC / "predict.py"]',
            '[*sorted((SRC / "checkpoint").glob("*.py")), SRC / "train" / "classify.py"]',
        ),
    )
    sub(
        "tests/elastic/test_members.py",
        ('"paceline" / "compare.py"', '"paceline" / "elastic" / "consistency.py"'),
        ('"link" / "pulse.py"', '"elastic" / "heartbeat.py"'),
    )
    sub("tests/engine/test_cores.py", ("session.shelf", "session.plan_cache"))
    sub(
        "tests/report/test_live.py",
        ("Path(status_server.__file__).parent.parent)", "Path(status_server.__file__).parents[2])"),
    )
    sub("tests/data/test_sample.py", ('files("paceline") / "sample"', 'files("paceline.train") / "sample"'))
    sub("tests/session/test_needs.py", ("map(str, (tmp_path, HERE))", "map(str, (tmp_path, HERE, HERE.parent))"))
    waiting = 'WAITING = "link", "exchange", "elastic", "engine", "launch", '
    sub(
        "tests/launch/test_clocks.py",
        (
            waiting + '"loop.py", "balance.py", "pace.py", "interrupt.py"',
            waiting + '"checkpoint", "step.py", "data/load_balance.py", "pace.py"',
        ),
    )


main()
finish()
move_tests()
