"""Decoder of PTX text: modules, kernels, registers, labels and instructions, with PTX and source line numbers.

Grammar: PTX ISA manual, chapters "Syntax", "State Spaces, Types, and Variables", "Instruction Operands"
and "Directives". Only the structure is decoded here; what an instruction means is the business of its handler.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import PtxSyntaxError

TYPE_BYTES = {
    t: n
    for n, names in {
        1: "b8 u8 s8",
        2: "b16 u16 s16 f16 bf16",
        4: "b32 u32 s32 f32 f16x2 bf16x2 tf32",
        8: "b64 u64 s64 f64 f32x2",
        16: "b128",
    }.items()
    for t in names.split()
}


@dataclass(frozen=True)
class Reg:
    """Register operand: index into the kernel's register table."""

    index: int
    type: str
    name: str


@dataclass(frozen=True)
class Special:
    """Special register such as %tid.x (manual, "Special Registers")."""

    name: str


@dataclass(frozen=True)
class Imm:
    """Immediate. `kind` is int, f32 (0f form, value = bits), f64 (0d form, value = bits) or dec (decimal float)."""

    value: object
    kind: str = "int"


@dataclass(frozen=True)
class Sym:
    """Name of a variable, parameter or label."""

    name: str


@dataclass(frozen=True)
class Addr:
    """[base + offset] or [base, {coordinates}]; base is Reg, Sym or Imm."""

    base: object
    offset: int = 0
    coords: tuple = ()


@dataclass(frozen=True)
class Vec:
    items: tuple


@dataclass(frozen=True)
class Pair:
    """Two destinations written a|b (setp, shfl, elect)."""

    first: object
    second: object


@dataclass(frozen=True)
class Not:
    """Negated predicate operand."""

    item: object


@dataclass(frozen=True)
class Sink:
    """The operand '_': result thrown away."""


@dataclass(frozen=True)
class Bad:
    """Operand text the decoder cannot read; reported only if the instruction is executed."""

    text: str


@dataclass
class Instruction:
    opcode: str  # full dotted opcode as written
    operands: tuple
    predicate: Reg | None
    negated: bool
    line: int  # PTX line number, from 1
    source: tuple | None  # (file, line) from the last .loc
    text: str
    scope: int = 0

    @property
    def parts(self):
        return self.opcode.split(".")


@dataclass
class Variable:
    """.shared, .global, .const, .local or .param declaration. size 0 = extern array (dynamic shared memory)."""

    name: str
    space: str
    size: int
    align: int
    offset: int = 0
    init: bytes | None = None
    type: str = "b8"


@dataclass
class Kernel:
    name: str
    params: list = field(default_factory=list)
    registers: list = field(default_factory=list)  # [(name, type)]
    variables: dict = field(default_factory=dict)  # name -> Variable (.shared and .local of the body)
    code: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)  # (scope, name) -> index into code
    scopes: dict = field(default_factory=lambda: {0: None})  # scope -> parent
    directives: dict = field(default_factory=dict)  # reqntid, maxntid, reqnctapercluster ...
    shared_size: int = 0
    local_size: int = 0

    def label(self, scope, name):
        """Index of the instruction after label `name`, as seen from `scope` (labels of inner braces are local)."""
        while scope is not None:
            if (scope, name) in self.labels:
                return self.labels[scope, name]
            scope = self.scopes[scope]
        return None


@dataclass
class Module:
    target: str = ""
    version: str = ""
    kernels: dict = field(default_factory=dict)
    variables: dict = field(default_factory=dict)  # module-scope .shared, .global, .const
    files: dict = field(default_factory=dict)


_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")
_VAR = re.compile(r"\.(shared|global|const|local|param)\b(.*)", re.S)
_INT = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)[uU]?$")
_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid|laneid|warpid|nwarpid"
    r"|smid|nsmid|gridid|clock|clock_hi|clock64|globaltimer|globaltimer_lo|globaltimer_hi|cluster_ctarank"
    r"|cluster_nctarank|is_explicit_cluster|lanemask_\w+|dynamic_smem_size|total_smem_size"
    r"|reserved_smem_\w+|envreg\d+|pm\d+)(\.[xyzw])?$"
)


def split_commas(text):
    """Split at commas outside brackets of any kind."""
    if not ("[" in text or "{" in text or "(" in text):
        parts = [part.strip() for part in text.split(",")]
        return parts if parts[-1] else parts[:-1]
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return parts + [last] if last else parts


class _Scanner:
    """Feeds characters of the PTX text to the module decoder as whole statements."""

    def __init__(self, text):
        self.module = Module()
        self.kernel = None
        self.source, self.inline = None, False
        self.scope, self.names = 0, [{}]
        self.depth = 0
        self.skipping = False  # body of a .func: not executed, call is unsupported
        self.buffer, self.buffer_line = "", 0
        self.pending_kernel = None
        text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
        for number, line in enumerate(text.split("\n"), 1):
            if ".section" in line and not self.kernel and line.lstrip().startswith(".section"):
                break  # debug sections run to the end of the file
            self.feed(line, number)
        if self.kernel:
            raise PtxSyntaxError(f"the body of {self.kernel.name} is not closed")
        for kernel in self.module.kernels.values():  # .file may follow the code that refers to it
            for i in kernel.code:
                if i.source and i.source[0] in self.module.files:
                    i.source = (self.module.files[i.source[0]], i.source[1])

    def feed(self, line, number):
        if "//" in line:
            line, comment = line.split("//", 1)
            if "inline asm" in comment:  # within, .loc counts on from the statement's line: not lines of the source
                self.inline = "begin" in comment
        if not self.buffer:
            head = line.strip()
            if head.startswith(".loc"):
                words = head.replace(",", " ").split()
                if not self.inline:
                    self.source = (int(words[1]), int(words[2]))
                return
            if head.startswith(".file"):
                m = re.match(r'\.file\s+(\d+)\s+"(.*?)"', head)
                if m:
                    self.module.files[int(m.group(1))] = m.group(2)
                return
            for key in ("version", "target", "address_size"):
                if head.startswith("." + key):
                    setattr(self.module, key, head.split(None, 1)[1].split(",")[0].strip())
                    return
        pos = 0
        while pos < len(line):
            if not self.buffer.strip():
                while pos < len(line) and line[pos].isspace():
                    pos += 1
                if pos >= len(line):
                    return
                c = line[pos]
                if c in "{}":
                    self.brace(c)
                    pos += 1
                    continue
                m = _LABEL.match(line, pos)
                if m and self.kernel:
                    self.kernel.labels[self.scope, m.group(1)] = len(self.kernel.code)
                    pos = m.end()
                    continue
                self.buffer_line = number
            end = line.find(";", pos)
            if not self.depth and "=" not in self.buffer + line[pos:].split(";")[0]:
                brace = line.find("{", pos)
                end = brace if end < 0 or 0 <= brace < end else end
            if end < 0:
                self.buffer += line[pos:] + " "
                return
            self.buffer += line[pos:end]
            statement, self.buffer = self.buffer.strip(), ""
            if line[end] == "{":
                self.header(statement)
                pos = end
            else:
                if statement:
                    self.statement(statement)
                pos = end + 1

    def brace(self, c):
        if c == "{":
            self.depth += 1
            if self.depth == 1:
                self.kernel, self.pending_kernel = self.pending_kernel, None
                self.scope, self.names, self.source = 0, [{}], None
            elif self.kernel:
                new = len(self.kernel.scopes)
                self.kernel.scopes[new] = self.scope
                self.scope = new
                self.names.append({})
            return
        self.depth -= 1
        if self.depth == 0:
            if self.kernel:
                _close(self.kernel)
                self.module.kernels[self.kernel.name] = self.kernel
            self.kernel = None
        elif self.kernel:
            self.scope = self.kernel.scopes[self.scope]
            self.names.pop()

    def header(self, text):
        m = re.search(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?(.*)", text, re.S)
        if not m:
            self.pending_kernel = None
            return
        kernel = Kernel(m.group(1))
        offset = 0
        for declaration in split_commas(m.group(2) or ""):
            v = _variable(declaration)
            v.offset = -(-offset // v.align) * v.align
            offset = v.offset + v.size
            kernel.params.append(v)
        for d, values in re.findall(
            r"\.(reqntid|maxntid|reqnctapercluster|maxnreg|minnctapersm|maxclusterrank"
            r"|explicitcluster|blocksareclusters)\b\s*([\d\s,]*)",
            m.group(3),
        ):
            kernel.directives[d] = tuple(int(x) for x in values.replace(",", " ").split())
        self.pending_kernel = kernel

    def statement(self, text):
        if self.depth == 0:
            if _VAR.search(text) and ".func" not in text:
                v = _variable(text)
                self.module.variables[v.name] = v
            return
        if self.kernel is None:
            return
        if text.startswith(".reg"):
            self.registers(text)
        elif text.startswith("."):
            if _VAR.match(text) or re.match(r"\.(shared|local)", text):
                v = _variable(text)
                self.kernel.variables[v.name] = v
        else:
            self.instruction(text)

    def registers(self, text):
        m = re.match(r"\.reg\s*(?:\.v\d\s*)?\.(\w+)\s+(.*)", text, re.S)
        if not m:
            raise PtxSyntaxError(f"line {self.buffer_line}: cannot read register declaration {text!r}")
        kind = m.group(1)
        for name in split_commas(m.group(2)):
            many = re.match(r"([\w$%]+)<(\d+)>$", name)
            for n in [f"{many.group(1)}{i}" for i in range(int(many.group(2)))] if many else [name]:
                self.names[-1][n] = Reg(len(self.kernel.registers), kind, n)
                self.kernel.registers.append((n, kind))

    def lookup(self, name):
        for scope in reversed(self.names):
            if name in scope:
                return scope[name]
        return None

    def instruction(self, text):
        predicate, negated = None, False
        m = re.match(r"@\s*(!?)\s*([\w$%]+)\s+(.*)", text, re.S)
        body = text
        if m:
            negated, predicate, body = bool(m.group(1)), self.lookup(m.group(2)), m.group(3)
            if predicate is None:
                raise PtxSyntaxError(f"line {self.buffer_line}: predicate {m.group(2)} is not declared")
        opcode, _, rest = body.replace("\t", " ").partition(" ")
        operands = tuple(self.operand(t) for t in split_commas(rest.strip()))
        self.kernel.code.append(
            Instruction(
                opcode,
                operands,
                predicate,
                negated,
                self.buffer_line,
                self.source,
                re.sub(r"\s+", " ", text),
                self.scope,
            )
        )

    def operand(self, text):
        text = text.strip()
        reg = self.lookup(text)
        if reg is not None:
            return reg
        if text == "_":
            return Sink()
        if text.startswith("{") and text.endswith("}"):
            return Vec(tuple(self.operand(t) for t in split_commas(text[1:-1])))
        if text.startswith("["):
            return self.address(text)
        if text.startswith("!"):
            return Not(self.operand(text[1:]))
        if "|" in text:
            a, b = text.split("|", 1)
            return Pair(self.operand(a), self.operand(b))
        if _SPECIAL.match(text):
            return Special(text)
        return _immediate(text) or (Sym(text) if re.match(r"[A-Za-z_$%][\w$.]*$", text) else Bad(text))

    def address(self, text):
        inner = text[1 : text.rindex("]")]
        parts = split_commas(inner)
        coords = ()
        if len(parts) > 1:
            c = [self.operand(p) for p in parts[1:]]
            coords = c[0].items if len(c) == 1 and isinstance(c[0], Vec) else tuple(c)
        m = re.match(r"([\w$%.]+)\s*(?:\+\s*(-?\s*\w+)|(-\s*\d+))?$", parts[0].strip())
        if not m:
            return Bad(text)
        base = self.operand(m.group(1))
        offset = int((m.group(2) or m.group(3) or "0").replace(" ", "").rstrip("U"), 0)
        return Addr(base, offset, coords)


def _immediate(text):
    if _INT.match(text):
        return Imm(
            int(text.rstrip("uU"), 0) if not re.match(r"-?0\d", text.rstrip("uU")) else int(text.rstrip("uU"), 8)
        )
    m = re.match(r"0([fFdD])([0-9a-fA-F]+)$", text)
    if m:
        return Imm(int(m.group(2), 16), "f32" if m.group(1) in "fF" else "f64")
    if re.match(r"-?\d*\.\d+([eE][-+]?\d+)?$|-?\d+\.\d*([eE][-+]?\d+)?$", text):
        return Imm(float(text), "dec")
    if text == "WARP_SZ":
        return Imm(32)
    return None


def _variable(text):
    """Decode a variable or parameter declaration."""
    head, _, init = text.partition("=")
    space = re.search(r"\.(shared|global|const|local|param)\b", head)
    align = re.search(r"\.align\s+(\d+)", head)
    types = [t for t in re.findall(r"\.(\w+)", head) if t in TYPE_BYTES or t == "pred"]
    name = re.search(r"([A-Za-z_$%][\w$]*)\s*((?:\[\s*\w*\s*\])*)\s*$", head.strip())
    if not (space and types and name):
        raise PtxSyntaxError(f"cannot read the declaration {text!r}")
    esize = TYPE_BYTES[types[0]]
    vector = re.search(r"\.v([248])\b", head)
    size = esize * (int(vector.group(1)) if vector else 1)
    natural = size
    for dim in re.findall(r"\[\s*(\w*)\s*\]", name.group(2)):
        size *= int(dim, 0) if dim else 0
    data = None
    if init.strip():
        values = re.findall(r"-?0[xX][0-9a-fA-F]+|-?\d+", init)
        data = b"".join((int(x, 0) % (1 << 8 * esize)).to_bytes(esize, "little") for x in values)
        size = size or len(data)
        data = data.ljust(size, b"\0")
    # the alignment given by ".ptr .align N" speaks of the pointee, not of the parameter
    own = re.search(r"\.ptr\b.*", head)
    if own and align and own.start() < align.start():
        align = None
    return Variable(
        name.group(1), space.group(1), size, int(align.group(1)) if align else natural, init=data, type=types[0]
    )


def _close(kernel):
    """Lay out the kernel's own .shared and .local variables."""
    for space in ("shared", "local"):
        offset = 0
        for v in kernel.variables.values():
            if v.space == space and v.size:
                v.offset = -(-offset // v.align) * v.align
                offset = v.offset + v.size
        setattr(kernel, space + "_size", offset)


def decode(text: str) -> Module:
    """Decode PTX text. Raises PtxSyntaxError on text that is not PTX; unknown instructions are kept as they are."""
    return _Scanner(text).module
