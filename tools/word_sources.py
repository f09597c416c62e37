"""Find texts and names in the files of a checkout, for `words.py`."""

import ast
import bisect
import os
import re
import subprocess
import sys

# ---------------------------------------------------------------------------------------- patterns
# name: (regular expression, counts towards CORE, what to write instead)
# Each was read in 30 places of the anchors; a pattern of which more than a third was plain English was
# narrowed, left out or listed without counting ("in which case", "no longer", "only if", "by default", "older ones").
PATTERNS = {
    "what_clause": (
        r"(?<![\w'’\"“])[Ww]hat(?!'s| if\b| to\b| happen| is (?:called|going)\b| you\b| we\b| kinds?\b| type\b| it was\b)"
        r"(?=\s+(?:\w+\s+){0,6}?\w+)(?![^.!?\n]{0,160}\?)",
        True, "name the thing: 'the running job', not 'what runs'"),
    "that_of": (
        r"\b(?:that of|(?:those|the ones?) (?:of|in|on|from|with|which|below|above))\b",
        True, "repeat the noun"),
    "opens_off_subject": (
        r"(?:(?<=[.:;!?]\s)|^)(?:Of|Besides|Among|Where(?! to\b)|Behind(?! the scenes)|Beside|Nor|Neither|Never|Whatever|Whoever"
        r"|Between|To \w+ (?:is|are)|What)\b(?![^.!?\n]{0,160}\?)",
        True, "begin with the subject, or with If/When"),
    "trailing_too": (
        r", (?:too|anew|again|at all|alone)(?=[.,;:)]|$)"
        r"|\w (?:too|alone|anew|besides|beforehand|thereby|by itself|by themselves)(?=[.;:)]|$)",
        True, "also, only, again: before the verb; or drop it"),
    "postposed_alone": (
        r"(?<!left )(?<!leave )\b(?:alone|anew|at hand|by itself|by themselves|besides)\b|\b(?:whole|in all)(?=[.,;:)]|$| (?:in|on|of|for|by|and)\b)",
        True, "only, all, the entire, again"),
    "personified": (
        r"\b(?:(?:is|are|was|were|be|been) (?:told|asked|said|heard)|says (?:so|that|why|which|how|what)|said so"
        r"|say (?:so|why|which|what)|tells\b(?! (?:apart|you|me|us))|knows|learns|wants|sees|saw|asks|promises"
        r"|forgets|remembers|believes|takes it|stands|stood)\b",
        True, "software receives, reports, reads, detects, requires"),
    "negative_subject": (
        r"(?<![=(/\w])(?<![Dd]oes )(?<![Ii]f )(?<!all-or-)(?<!or )(?:[Nn]othing(?! to\b)|[Nn]obody|[Nn]o one\b(?!-)|[Nn]one of|none (?:is|are|was|were|has|have|does|do|can|fits?)"
        r"|(?:(?<=[.:;]\s)|^)(?:[Nn]either|[Nn]o) \w+ (?:is|are|was|were|has|have|does|do|can|may))\b",
        True, "'X is not ...', 'there is no ...'"),
    "semicolon": (r";(?=\s)(?!\s*arXiv)", True, "two sentences"),
    "ones_others": (
        r"(?<![.\w-])(?:ones|the (?:former|latter)|of its own|(?:all|most|some|none|half) of (?:them|it))\b",
        False, "repeat the noun"),
    "odd_word": (
        r"\b(?:anew|thereby|therein|therefrom|whereof|hitherto|besides|beforehand|likewise|refus(?:e|es|ed|al|als)|unasked"
        r"|unprompted|unreached|undecided|unseen|mildest|near-?by|at once|wordless|without a word|in turns|gone|die[sd]?|dead"
        r"|lives|lies|laid|lay|pays?|paid|owes?|suits?|bears?|stands in|stands for"
        r"|leaves? (?:it|out|behind)|left out|put together|goes? on|went on"
        r"|gets? (?:it|them|one)|had (?:when|before|at)|has it|have it|be had|is had|looks? (?:up|at) by)\b",
        False, "the field's word: reject, run, exclude, contain, immediately"),
}
RX = {name: re.compile(p, re.M) for name, (p, _, _) in PATTERNS.items()}
CORE = [name for name, (_, core, _) in PATTERNS.items() if core]
KINDS = ["docs", "README", "help", "docstrings", "messages", "strings", "tests", "commits"]

VERBS = set("""
accept account activate adapt add address adjust adopt advance aggregate align allocate allow append apply approximate
ask assemble assert assign assume attach average await back backport begin bind block break bring broadcast build bump
cache calculate call cancel capture cast change check choose clamp clarify clean clear clip clone close collate collect
combine compare compile complete compose compress compute configure connect construct consume continue control convert
copy correct count cover create cut decide decode decompress decorate decrease dedupe default defer define delete derive
describe deserialize destroy detach detect determine disable disallow discard discover dispatch display divide document
download drain draw drop dump emit enable encode end enforce ensure enter enumerate escape estimate evaluate exclude
execute exit expand explain export expose extend extract fail fetch fill filter finalize find finish fit fix flatten
flush fold follow force fork format forward freeze gather generate get give go group guard handle harden hash hide hold
identify ignore implement import improve include increase increment index infer inherit init initialize inject insert
inspect install instantiate interpolate interrupt introduce invoke iterate join keep kill launch leave let lift limit
link lint list listen load lock log look lower make manage map mark mask match materialize measure merge migrate mirror
mix modernize modify move name normalize note notify observe obtain omit open optimize order override pack pad parse
partition pass patch perform pick pin place plan plot polish poll pop populate predict preload prepare prevent print
process produce profile propagate protect prove provide prune publish pull push put quantize query queue quote raise
randomize read rebuild receive recompute record recover redirect reduce refactor refine refresh refuse regenerate
register reject relax release reload rely remove rename render reorder repeat replace report represent request require
reserve reset reshape resolve respect restart restore resume retrieve retry return reuse revert revise reword rewrite
rework rotate round route run sample save say scale scan schedule score search see seed select send separate serialize
serve set setup shard share shift shorten show shuffle shut shutdown sign simplify skip slice sort specify speed speedup
spell split spread stabilize stack start state stop store stream strip submit subtract suggest sum support suppress swap
switch sync synchronize tag take teach tell terminate test throw tidy tighten time tokenize toggle touch trace track
train transfer transform translate traverse treat trigger trim truncate try tune turn unfreeze unify unlock unpack
unshard unwrap update upgrade upload use validate verify view visit wait walk warm warn watch weigh work wrap write
yield zero
""".split())
CLAUSE_OPENING = re.compile(  # a docstring that cannot be read without its neighbour
    r"\W*(?:What|Whether|Which|Who|Whose|Where|When|How|Of|Those|That|All of|One of|The (?:most|same|other|rest|one)|It|They"
    r"|Others|Both|As|By|To|In|On|With|Without|Not|Nothing|None|No|Between|From|For|At|Under|Over|Up|Beside|Behind)\b")
SINK = re.compile(
    r"(?:warn|warning|info|error|critical|exception|debug|print|echo|problem|note|notice|say|tell|reject|refuse|advice"
    r"|Error|Warning|Exception|Problem|Note|Rule|Refusal)$", re.I)
TEXT_KEYWORDS = {"why", "fix", "remark", "reason", "help", "hint", "message", "msg", "description", "epilog", "note", "detail"}
NOT_SOURCE = re.compile(
    r"(^|/)(tests?|test_utils|benchmarks?|examples|website|experiments|third_party)/|^(docs|tools|scripts|\.\w+)/|conftest|/test_"
    r"|(^|/)setup\.py$")
NOT_DOCS = re.compile(
    r"/lab/|/notes/|CHANGELOG|changelog|reference/(claims|rules|techniques|benchmarks|config/)|package_reference|/api/")

# Six anchors, measured by this script: newest 2025-12 to 2026-08 snapshots of the public repositories.
ANCHORS = {
    "hydra": {"docs": 1.5, "README": 0.0, "help": None, "docstrings": 1.2, "messages": 1.0, "strings": 0.0, "tests": 0.0, "commits": 0.0,
        "docs.phrases": 0.6, "README.phrases": 0.0, "help.phrases": None, "docstrings.phrases": 0.9, "messages.phrases": 0.0, "strings.phrases": 0.0, "tests.phrases": 0.0, "commits.phrases": 0.0,
        "verb_docstrings": 51.1, "no_docstring": 84.1, "clause_docstrings": 0.0, "clause_modules": 0.0, "commits_read": 200, "commit_imperative": 91.0, "commit_long": 5.0,
        "commit_two_things": 0.5, "public": 200, "public_per_1000": 22.2, "own_only": 91, "crossing": 101, "bypass": 206, "shared": 7, "file_names": 8},
    "torchtitan": {"docs": 3.6, "README": 1.2, "help": 3.7, "docstrings": 5.7, "messages": 10.1, "strings": 5.0, "tests": 0.3, "commits": 1.5,
        "docs.phrases": 2.3, "README.phrases": 0.0, "help.phrases": 0.0, "docstrings.phrases": 0.9, "messages.phrases": 0.5, "strings.phrases": 0.0, "tests.phrases": 0.3, "commits.phrases": 0.0,
        "verb_docstrings": 69.8, "no_docstring": 54.0, "clause_docstrings": 3.5, "clause_modules": 1.5, "commits_read": 200, "commit_imperative": 82.5, "commit_long": 18.5,
        "commit_two_things": 2.0, "public": 675, "public_per_1000": 13.9, "own_only": 288, "crossing": 197, "bypass": 475, "shared": 14, "file_names": 70},
    "submitit": {"docs": 0.3, "README": 0.0, "help": None, "docstrings": 0.7, "messages": 1.8, "strings": None, "tests": None, "commits": 0.0,
        "docs.phrases": 0.3, "README.phrases": 0.0, "help.phrases": None, "docstrings.phrases": 0.5, "messages.phrases": 1.8, "strings.phrases": None, "tests.phrases": None, "commits.phrases": 0.0,
        "verb_docstrings": 81.7, "no_docstring": 52.4, "clause_docstrings": 0.0, "clause_modules": 0.0, "commits_read": 148, "commit_imperative": 83.8, "commit_long": 7.4,
        "commit_two_things": 0.7, "public": 61, "public_per_1000": 19.7, "own_only": 31, "crossing": 21, "bypass": 28, "shared": 0, "file_names": 0},
    "accelerate": {"docs": 1.3, "README": 2.5, "help": None, "docstrings": 0.5, "messages": 0.9, "strings": 1.7, "tests": 0.0, "commits": 0.0,
        "docs.phrases": 1.1, "README.phrases": 0.8, "help.phrases": None, "docstrings.phrases": 0.3, "messages.phrases": 0.8, "strings.phrases": 0.8, "tests.phrases": 0.0, "commits.phrases": 0.0,
        "verb_docstrings": 70.6, "no_docstring": 47.5, "clause_docstrings": 2.2, "clause_modules": 0.0, "commits_read": 200, "commit_imperative": 72.5, "commit_long": 23.0,
        "commit_two_things": 2.5, "public": 528, "public_per_1000": 20.1, "own_only": 226, "crossing": 240, "bypass": 122, "shared": 5, "file_names": 2},
    "axolotl": {"docs": 2.9, "README": 0.0, "help": 1.7, "docstrings": 5.3, "messages": 6.0, "strings": 2.3, "tests": 0.5, "commits": 0.0,
        "docs.phrases": 0.0, "README.phrases": 0.0, "help.phrases": 0.0, "docstrings.phrases": 0.5, "messages.phrases": 0.3, "strings.phrases": 0.3, "tests.phrases": 0.5, "commits.phrases": 0.0,
        "verb_docstrings": 65.6, "no_docstring": 55.0, "clause_docstrings": 0.8, "clause_modules": 0.6, "commits_read": 200, "commit_imperative": 63.5, "commit_long": 39.5,
        "commit_two_things": 0.5, "public": 1782, "public_per_1000": 17.1, "own_only": 1038, "crossing": 330, "bypass": 609, "shared": 39, "file_names": 164},
    "torchtune": {"docs": 0.9, "README": 0.7, "help": 0.0, "docstrings": 0.2, "messages": 1.0, "strings": 0.0, "tests": 0.0, "commits": 0.8,
        "docs.phrases": 0.6, "README.phrases": 0.0, "help.phrases": 0.0, "docstrings.phrases": 0.2, "messages.phrases": 0.0, "strings.phrases": 0.0, "tests.phrases": 0.0, "commits.phrases": 0.0,
        "verb_docstrings": 59.1, "no_docstring": 30.0, "clause_docstrings": 0.3, "clause_modules": 0.0, "commits_read": 200, "commit_imperative": 74.0, "commit_long": 10.5,
        "commit_two_things": 0.5, "public": 797, "public_per_1000": 16.7, "own_only": 484, "crossing": 160, "bypass": 152, "shared": 36, "file_names": 99},
}


# ------------------------------------------------------------------------------------ reading files
class Tree:
    """Files of a work tree, or of one revision of a git directory."""

    def __init__(self, root, rev=None):
        self.root, self.rev = root, rev
        if rev:
            names = self.git("ls-tree", "-r", "--name-only", rev)
        else:
            names = self.git("ls-files", "--cached", "--others", "--exclude-standard")
        self.names = sorted(set(names.splitlines()))

    def git(self, *args, stdin=None, raw=False):
        done = subprocess.run(["git", "-C", self.root, *args], input=stdin, capture_output=True)
        if done.returncode:
            sys.exit(f"git {' '.join(args)}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout if raw else done.stdout.decode("utf-8", "replace")

    def read(self, names):
        """Return {name: text} of the files that exist and are text."""
        if not self.rev:
            found = {}
            for name in names:
                try:
                    with open(os.path.join(self.root, name), encoding="utf-8", errors="replace") as file:
                        found[name] = file.read()
                except OSError:  # deleted, a folder or a broken link
                    continue
            return found
        out = self.git("cat-file", "--batch", stdin="".join(f"{self.rev}:{n}\n" for n in names).encode(), raw=True)
        found, at = {}, 0
        for name in names:
            end = out.index(b"\n", at)
            head = out[at:end].split()
            at = end + 1
            if len(head) == 3 and head[2].isdigit():
                size = int(head[2])
                if head[1] == b"blob":
                    found[name] = out[at:at + size].decode("utf-8", "replace")
                at += size + 1
        return found


class Unit:
    """One paragraph of prose, with the line of each of its words."""

    def __init__(self, path, text, line):
        words, lines = [], []
        for offset, row in enumerate(text.split("\n")):
            for word in row.split():
                words.append(word)
                lines.append(line + offset)
        self.path, self.lines, self.text = path, lines, " ".join(words)
        self.starts, at = [], 0
        for word in words:
            self.starts.append(at)
            at += len(word) + 1

    def line_at(self, offset):
        return self.lines[max(0, bisect.bisect_right(self.starts, offset) - 1)]


def paragraphs(path, text, line=1):
    """Split at blank lines and return Units."""
    units, block, start = [], [], line
    for number, row in enumerate(text.split("\n") + [""], line):
        if row.strip():
            if not block:
                start = number
            block.append(row)
        elif block:
            units.append(Unit(path, "\n".join(block), start))
            block = []
    return units


def blank(match):
    return "\n" * match.group().count("\n")


def hide_code(text):
    return re.sub(r"`+[^`\n]*`+", "CODE", text)


def markdown_units(path, text):
    """Return the prose of a page: no code, tables, headings, markup; each list item is its own unit."""
    text = re.sub(r"\A---\n.*?\n---\n", blank, text, flags=re.S)
    text = re.sub(r"<!--.*?-->", blank, text, flags=re.S)
    text = re.sub(r"^(```|~~~).*?^\1[^\n]*$", blank, text, flags=re.S | re.M)
    for pattern in (r"^(?: {4,}|\t).*$", r"^\s*\|.*$", r"^\s*(?:import|export) .*$", r"^\.\. .*$", r"^\s*:\w+:.*$",
                    r"^[=\-~^]{3,}$", r"^#+ .*$", r"!\[[^\]]*\]\([^)]*\)"):
        text = re.sub(pattern, blank, text, flags=re.M)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<https?:[^>]*>|https?:\S+", "URL", text)
    text = re.sub(r"<[^>\n]+>", "", text)
    text = re.sub(r"\*+|__", "", hide_code(text))
    units, block, start = [], [], 1
    for number, row in enumerate(text.split("\n") + [""], 1):
        item = re.match(r"\s*(?:[-*+]|\d+\.)\s+", row)
        if (item or not row.strip()) and block:
            units.append(Unit(path, "\n".join(block), start))
            block = []
        if row.strip():
            if not block:
                start = number
            block.append(row[item.end():] if item else row)
    return units


# -------------------------------------------------------------------------------------- reading Python
def literal_texts(node):
    """Yield (line, text) of the string literals below a node; expressions in f-strings become X."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.lineno, node.value
    elif isinstance(node, ast.JoinedStr):
        yield node.lineno, "".join(v.value if isinstance(v, ast.Constant) else "X" for v in node.values)
    else:
        for child in ast.iter_child_nodes(node):
            yield from literal_texts(child)


def is_prose(text):
    """Return whether a literal is a text of four words or more, not CSS, shell, code or a template."""
    if re.search(r"[{}$]|;\s*\n|</|&&|\|\|", text):
        return False
    return len(re.findall(r"[A-Za-z]{2,}", text)) >= 4 and " " in text.strip()


def first_word(text):
    match = re.match(r"\W*([A-Za-z]+)", text or "")
    return match.group(1).lower() if match else ""


def is_verb(word):
    return word in VERBS or (word[-1:] == "s" and word[:-1] in VERBS) or (word[-2:] == "es" and word[:-2] in VERBS)


def decorators(node):
    for d in node.decorator_list:
        d = d.func if isinstance(d, ast.Call) else d
        yield d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "")


def walk(tree):
    """Return the nodes of a tree as ast.walk does, without contexts (Load, Store), in half the time."""
    nodes = [tree]
    for node in nodes:
        for value in vars(node).values():
            if isinstance(value, list):
                nodes.extend(each for each in value if isinstance(each, ast.AST))
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                nodes.append(value)
    return nodes


class PythonFile:
    """Texts and names of one source file."""

    def __init__(self, path, source):
        self.path, self.tree = path, ast.parse(source)
        self.nodes = walk(self.tree)
        self.nonblank = sum(bool(row.strip()) for row in source.splitlines())
        self.docstrings, self.help, self.messages, self.strings = [], [], [], []
        self.functions = []  # (line, name, first word of the docstring or None, public, property)
        taken, seen = set(), set()
        for node in self.nodes:
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[0] if node.body else None
                has = isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant) and isinstance(body.value.value, str)
                if has:
                    taken.add(id(body.value))
                    self.docstrings.append((body.lineno, body.value.value, node))
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    self.functions.append((node.lineno, node.name, first_word(body.value.value) if has else None,
                                           any("property" in d for d in decorators(node))))
        for node in self.nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) \
                    and id(node.value) not in taken:
                taken.add(id(node.value))
                self.help.append((node.lineno, node.value.value))
            found = []
            if isinstance(node, ast.Raise) and node.exc is not None:
                found = list(literal_texts(node.exc))
            elif isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name and SINK.search(name):
                    for arg in node.args:
                        found += literal_texts(arg)
                for keyword in node.keywords:
                    if keyword.arg in TEXT_KEYWORDS:
                        found += literal_texts(keyword.value)
            for line, text in found:
                if is_prose(text) and text not in seen:
                    seen.add(text)
                    self.messages.append((line, text))
        inside = set()
        for node in self.nodes:
            if isinstance(node, ast.JoinedStr):
                inside.update(id(v) for v in node.values)
            if id(node) in taken or id(node) in inside or not isinstance(node, (ast.Constant, ast.JoinedStr)):
                continue
            for line, text in literal_texts(node):
                if is_prose(text) and text not in seen:
                    seen.add(text)
                    self.strings.append((line, text))


def yaml_comments(path, text):
    """Return the comment paragraphs of a YAML file as Units."""
    rows = [m.group(1) if (m := re.match(r"\s*#+ ?(.*)", row)) else "" for row in text.split("\n")]
    rows = [re.sub(r"^(?:\S+ -- |(?:Does|Costs|Saves|Needs|Source)\s+)", "", row) for row in rows]
    return [Unit(path, row, n) for n, row in enumerate(rows, 1) if is_prose(row)]


def yaml_texts(path, text):
    """Return the prose values of a YAML file as Units."""
    units = []
    for number, row in enumerate(text.split("\n"), 1):
        match = re.match(r"\s*(?:- )?(?:[\w.-]+:)?\s*[\"']?(.*?)[\"']?\s*$", row)
        if match and is_prose(match.group(1)) and not row.strip().startswith("#"):
            units.append(Unit(path, match.group(1), number))
    return units


# ------------------------------------------------------------------------------------------- names
class Names:
    """Public top-level names of a package, and who uses them."""

    def __init__(self, files, prefix):
        self.modules, self.files = {}, {}
        for path, file in files.items():
            module = path[len(prefix):-3].replace("/", ".")
            module = re.sub(r"\.?__init__$", "", module)
            self.modules[module], self.files[module] = file, path
        self.public = {m: self.defined(f.tree) for m, f in self.modules.items()}
        self.lines = sum(f.nonblank for f in self.modules.values())
        self.imports = {m: list(self.imported(m, f)) for m, f in self.modules.items()}
        self.used, self.crossing, self.bypass = set(), set(), []
        for module, file in self.modules.items():
            self.note_uses(module, file)

    @staticmethod
    def defined(tree):
        names = {}
        for node in tree.body:
            targets = []
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                targets = [node.name]
            elif isinstance(node, ast.Assign):
                targets = [t.id for t in node.targets if isinstance(t, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                targets = [node.target.id]
            for name in targets:
                if not name.startswith("_"):
                    names.setdefault(name, node.lineno)
        return names

    def imported(self, module, file):
        """Yield (line, module, name or None, local alias) of every import of this package."""
        is_package = file.path.endswith("__init__.py")
        top = {m.split(".")[0] for m in self.modules}
        for node in file.nodes:
            if isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = module.split(".")
                    keep = len(parts) - node.level + (1 if is_package else 0)
                    base = ".".join([*parts[:keep], *([base] if base else [])])
                if base.split(".")[0] in top:
                    for alias in node.names:
                        yield node.lineno, base, alias.name, alias.asname or alias.name
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] in top:
                        yield node.lineno, alias.name, None, alias.asname or alias.name.split(".")[0]

    def home(self, module, name, depth=0):
        """Return the module that defines a name imported from `module`, through re-exports."""
        if name in self.public.get(module, ()) or depth > 5:
            return module
        for _, source, original, local in self.imports.get(module, ()):
            if local == name and original:
                return self.home(source, original, depth + 1)
        return module

    def note_uses(self, module, file):
        package = ".".join(module.split(".")[:2])
        aliases = {}
        for line, source, name, local in self.imports[module]:
            if name is None:
                aliases[local] = source if local != source.split(".")[0] else local
                continue
            full = f"{source}.{name}"
            if full in self.modules:
                aliases[local] = full
                target, names = full, None
            else:
                target = self.home(source, name)
                names = (target, name)
                if not file.path.endswith("__init__.py") or not target.startswith(module):
                    self.used.add(names)
            other = ".".join(target.split(".")[:2])
            if target in self.modules and other != package and other.count(".") and package.count("."):
                if names:
                    self.crossing.add(names)
                if not self.files.get(full if full in self.modules else source, "").endswith("__init__.py"):
                    self.bypass.append((file.path, line, f"from {source} import {name}"))
        for node in file.nodes:
            if isinstance(node, ast.Attribute):
                chain, at = [node.attr], node.value
                while isinstance(at, ast.Attribute):
                    chain.append(at.attr)
                    at = at.value
                if isinstance(at, ast.Name) and at.id in aliases:
                    parts = [*aliases[at.id].split("."), *reversed(chain)]
                    for cut in range(len(parts) - 1, 0, -1):
                        base = ".".join(parts[:cut])
                        if base in self.modules:
                            home = self.home(base, parts[cut])
                            if home != module and home in self.modules:
                                self.used.add((home, parts[cut]))
                                if ".".join(home.split(".")[:2]) != package and package.count("."):
                                    self.crossing.add((home, parts[cut]))
                            break
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+[:.]\w+", node.value):
                base, _, name = node.value.replace(":", ".").rpartition(".")
                if base in self.modules and base != module:
                    self.used.add((base, name))


def main_package(names):
    """Return the folder of the largest package, such as src/eke or torchtune."""
    folders = {n[:-len("/__init__.py")] for n in names if n.endswith("/__init__.py")}
    outer = [f for f in folders if f.rpartition("/")[0] not in folders]
    return max(sorted(outer), key=lambda f: sum(n.startswith(f + "/") for n in names), default="")
