"""CodeWriter: writes functions in LLVM's intermediate representation and compiles them for this processor.

The package llvmlite carries LLVM, so that the machine needs no compiler.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from llvmlite import binding, ir

INT = ir.IntType(64)
FLOAT = ir.FloatType()
WORD = ir.IntType(32)


class CodeValue:
    """A number or vector of the written function. Operators append instructions; addresses are 64-bit integers."""

    __slots__ = ("raw", "writer")

    def __init__(self, writer: CodeWriter, raw: Any) -> None:
        self.writer, self.raw = writer, raw

    def _apply(self, integer: str, floating: str, other: CodeValue | float) -> CodeValue:
        builder, value = self.writer.builder, self.writer.constant(self.raw.type, other)
        is_float = self.raw.type in (FLOAT, self.writer.vector)
        return CodeValue(self.writer, getattr(builder, floating if is_float else integer)(self.raw, value.raw))

    def __add__(self, other: CodeValue | float) -> CodeValue:
        return self._apply("add", "fadd", other)

    def __sub__(self, other: CodeValue | float) -> CodeValue:
        return self._apply("sub", "fsub", other)

    def __mul__(self, other: CodeValue | float) -> CodeValue:
        return self._apply("mul", "fmul", other)

    def __floordiv__(self, other: CodeValue | float) -> CodeValue:
        return self._apply("udiv", "fdiv", other)

    def __mod__(self, other: CodeValue | int) -> CodeValue:
        return self._apply("urem", "frem", other)

    def __and__(self, other: CodeValue | int) -> CodeValue:
        return self._apply("and_", "", other)

    def __lshift__(self, other: CodeValue | int) -> CodeValue:
        return self._apply("shl", "", other)

    def __rshift__(self, other: CodeValue | int) -> CodeValue:
        return self._apply("lshr", "", other)

    def __lt__(self, other: CodeValue | float) -> CodeValue:
        return self.writer.compare("<", self, other)


class Variable:
    """A local variable of the written function. LLVM keeps it in a register where it can."""

    def __init__(self, writer: CodeWriter, initial: CodeValue) -> None:
        self._writer, self._type = writer, initial.raw.type
        with writer.builder.goto_entry_block():
            self._slot = writer.builder.alloca(self._type)
        self.set(initial)

    def get(self) -> CodeValue:
        """Append a load of the variable."""
        return CodeValue(self._writer, self._writer.builder.load(self._slot, typ=self._type))

    def set(self, value: CodeValue) -> None:
        """Append a store of ``value`` to the variable."""
        self._writer.builder.store(value.raw, self._slot)


class CodeWriter:
    """Functions of 64-bit integers without results. :meth:`compile` returns their addresses."""

    def __init__(self) -> None:
        self.module = ir.Module()
        self.builder: Any = None
        self._functions: dict[str, Any] = {}
        self._features = features = binding.get_host_cpu_features()
        # Of all processors with 64 bits only old x86 ones lack the conversion. LLVM would call a function that may not exist.
        self._converts_float16 = features.get("f16c", True)
        if features.get("avx512vnni") or features.get("avxvnni"):
            features["fast-dpwssd"] = True  # else LLVM splits the instruction that multiplies and adds to a sum
        self.lanes = 16 if features.get("avx512bw") else 8
        """Number of elements of a vector."""
        self.vector = ir.VectorType(FLOAT, self.lanes)
        self.int_vector = ir.VectorType(WORD, self.lanes)
        self.pairs = ir.VectorType(ir.IntType(16), 2 * self.lanes)
        """The two halves of each element of ``int_vector``."""

    @contextmanager
    def function(self, name: str, parameters: int) -> Generator[list[CodeValue]]:
        """Write a function in the scope, which receives the parameters."""
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [INT] * parameters), name)
        self._functions[name] = function
        function.attributes.alignstack = self.lanes * 4  # vectors on an unaligned stack would cross cache lines
        self.builder = ir.IRBuilder(function.append_basic_block())
        body = function.append_basic_block()
        self.builder.branch(body)
        self.builder.position_at_end(body)
        yield [CodeValue(self, argument) for argument in function.args]
        self.builder.ret_void()

    def call(self, name: str, *arguments: CodeValue | int) -> None:
        """Call a function that is already written."""
        self.builder.call(self._functions[name], [self.constant(INT, each).raw for each in arguments])

    def call_address(self, address: int, *arguments: CodeValue | int, result: Any = None) -> CodeValue:
        """Call the function of 64-bit integers at ``address``; ``result`` is the type of its result, if it has one."""
        kind = ir.FunctionType(result or ir.VoidType(), [INT] * len(arguments))
        pointer = self.builder.inttoptr(ir.Constant(INT, address), kind.as_pointer())
        return CodeValue(self, self.builder.call(pointer, [self.constant(INT, each).raw for each in arguments]))

    def compare(self, operator: str, value: CodeValue, other: CodeValue | float) -> CodeValue:
        """Return the result of a comparison of two numbers, or of the lanes of two vectors, of one type."""
        right = self.constant(value.raw.type, other).raw
        compare = self.builder.fcmp_ordered if value.raw.type in (FLOAT, self.vector) else self.builder.icmp_signed
        return CodeValue(self, compare(operator, value.raw, right))

    def constant(self, kind: Any, value: CodeValue | float | list[float]) -> CodeValue:
        """Return a constant of type ``kind``; a number fills all lanes. A :class:`CodeValue` is returned unchanged."""
        if isinstance(value, CodeValue):
            return value
        is_vector = isinstance(kind, ir.VectorType) and not isinstance(value, list)
        return CodeValue(self, ir.Constant(kind, [value] * kind.count if is_vector else value))

    def intrinsic(self, name: str, *operands: CodeValue) -> CodeValue:
        """Return the result of LLVM's vector operation ``name``, for example ``fma``."""
        full = f"llvm.{name}.v{self.lanes}f32"
        if full not in self._functions:
            kind = ir.FunctionType(self.vector, [self.vector] * len(operands))
            self._functions[full] = ir.Function(self.module, kind, full)
        return CodeValue(self, self.builder.call(self._functions[full], [each.raw for each in operands]))

    def add_products(self, values: CodeValue, others: CodeValue) -> CodeValue:
        """Multiply two vectors of integers of 16 bits, then add products 0 and 1, 2 and 3, and so on.

        LLVM has no such operation, but recognizes this form: on x86 it becomes one instruction, if the processor has one also
        with the addition to a sum.
        """
        wide = ir.VectorType(WORD, 2 * self.lanes)
        left, right = (self.builder.sext(self.builder.bitcast(each.raw, self.pairs), wide) for each in (values, others))
        products = self.builder.mul(left, right, flags=["nsw"])
        masks = (ir.Constant(self.int_vector, list(range(first, 2 * self.lanes, 2))) for first in range(2))
        even, odd = (self.builder.shuffle_vector(products, ir.Constant(wide, ir.Undefined), mask) for mask in masks)
        return CodeValue(self, self.builder.add(even, odd))

    def splat(self, number: CodeValue) -> CodeValue:
        """Return a vector with ``number`` in all lanes."""
        undefined = ir.Constant(ir.VectorType(number.raw.type, self.lanes), ir.Undefined)
        first = self.builder.insert_element(undefined, number.raw, ir.Constant(WORD, 0))
        return CodeValue(self, self.builder.shuffle_vector(first, undefined, ir.Constant(self.int_vector, None)))

    def halves(self, vector: CodeValue, combine: Any) -> CodeValue:
        """Return ``combine`` of all lanes of ``vector``, in a fixed order."""
        undefined, lanes = ir.Constant(self.vector, ir.Undefined), self.lanes
        while lanes > 1:
            lanes //= 2
            mask = ir.Constant(self.int_vector, [(index + lanes) % self.lanes for index in range(self.lanes)])
            vector = combine(vector, CodeValue(self, self.builder.shuffle_vector(vector.raw, undefined, mask)))
        return CodeValue(self, self.builder.extract_element(vector.raw, ir.Constant(WORD, 0)))

    def convert(self, operation: str, value: CodeValue, kind: Any) -> CodeValue:
        """Return ``value`` converted to ``kind`` by LLVM's instruction ``operation``, for example ``sitofp``."""
        return CodeValue(self, getattr(self.builder, operation)(value.raw, kind))

    def narrow(self, integers: CodeValue, bits: int) -> CodeValue:
        """Return the lowest ``bits`` of each integer of a vector."""
        return self.convert("trunc", integers, ir.VectorType(ir.IntType(bits), integers.raw.type.count))

    def load(self, kind: Any, address: CodeValue, align: int = 4) -> CodeValue:
        """Return the value of type ``kind`` at ``address``."""
        pointer = self.builder.inttoptr(address.raw, ir.PointerType())
        return CodeValue(self, self.builder.load(pointer, typ=kind, align=align))

    def load_halves(self, address: CodeValue) -> CodeValue:
        """Return the vector of finite float16 numbers at ``address`` as float32."""
        if self._converts_float16:
            return self.convert("fpext", self.load(ir.VectorType(ir.HalfType(), self.lanes), address, align=2), self.vector)
        integers = self.load(ir.VectorType(ir.IntType(16), self.lanes), address, align=2)
        bits = self.convert("zext", integers, self.int_vector)
        magnitude = self.convert("bitcast", (bits & 0x7FFF) << 13, self.vector) * 2.0**112  # the exponents' offsets differ
        signed = self.convert("bitcast", magnitude, self.int_vector) + ((bits & 0x8000) << 16)
        return self.convert("bitcast", signed, self.vector)

    def store(self, address: CodeValue, value: CodeValue) -> None:
        """Write ``value`` at ``address``."""
        self.builder.store(value.raw, self.builder.inttoptr(address.raw, ir.PointerType()), align=4)

    def prefetch(self, address: CodeValue) -> None:
        """Ask for the cache line at ``address``, which need not be mapped."""
        name, number = "llvm.prefetch.p0", ir.IntType(32)
        if name not in self._functions:
            kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(), number, number, number])
            self._functions[name] = ir.Function(self.module, kind, name)
        options = [ir.Constant(number, each) for each in (0, 3, 1)]  # a read, keep in all caches, data
        self.builder.call(self._functions[name], [self.builder.inttoptr(address.raw, ir.PointerType()), *options])

    def select_value(self, condition: CodeValue, yes: CodeValue, no: CodeValue | int) -> CodeValue:
        """Return ``yes`` where ``condition`` holds, else ``no``."""
        return CodeValue(self, self.builder.select(condition.raw, yes.raw, self.constant(yes.raw.type, no).raw))

    @contextmanager
    def when(self, condition: CodeValue) -> Generator[None]:
        """Run the scope only if ``condition`` holds."""
        with self.builder.if_then(condition.raw):
            yield

    @contextmanager
    def loop(self, start: CodeValue | int, stop: CodeValue | int, step: CodeValue | int = 1) -> Generator[CodeValue]:
        """Repeat the scope for the integers from ``start`` to ``stop`` (exclusive)."""
        index = Variable(self, self.constant(INT, start))
        blocks = [self.builder.append_basic_block() for _ in range(3)]
        self.builder.branch(blocks[0])
        self.builder.position_at_end(blocks[0])
        self.builder.cbranch((index.get() < stop).raw, blocks[1], blocks[2])
        self.builder.position_at_end(blocks[1])
        yield index.get()
        index.set(index.get() + step)
        self.builder.branch(blocks[0])
        self.builder.position_at_end(blocks[2])

    def compile(self) -> tuple[Any, dict[str, int]]:
        """Compile all functions for this processor. Return their owner, which must outlive them, and their addresses."""
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        target = binding.Target.from_default_triple()
        features = self._features.flatten()
        machine = target.create_target_machine(cpu=binding.get_host_cpu_name(), features=features, opt=3)
        module = binding.parse_assembly(str(self.module))
        builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
        builder.getModulePassManager().run(module, builder)
        engine = binding.create_mcjit_compiler(module, machine)
        engine.finalize_object()
        return engine, {name: engine.get_function_address(name) for name in self._functions if not name.startswith("llvm.")}
