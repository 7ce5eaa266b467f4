"""Vector code for numba: pieces of LLVM code over sixteen 32-bit lanes, one AVX-512 register.

numba vectorises loops as it sees fit, 256 bits wide on most processors, and knows no shuffles. A function decorated
with `emitted` writes its LLVM code itself and is called from compiled code like any other; arguments are int64,
addresses included. Imports numba: only for modules that are imported where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
LANE_BYTES = 64
"""Bytes of a vector: sixteen numbers of 32 bits."""

INT64 = ir.IntType(64)
_INT32, _INT16 = ir.IntType(32), ir.IntType(16)
FLOATS = ir.VectorType(ir.FloatType(), LANES)
WORDS = ir.VectorType(_INT32, LANES)
HALVES = ir.VectorType(_INT16, LANES)

# 2 ** r on [-1/2, 1/2] by its best polynomial of degree 4: 3e-6 of the value, where bfloat16 keeps 4e-3.
_EXP2 = (0.9999992847442627, 0.6931217908859253, 0.240247443318367, 0.05591786280274391, 0.009570099413394928)
_ROUND = 1.5 * 2.0**23
"""A float32 this large has no digits after the point: adding it rounds, and leaves the integer in the low bits."""
_SMALLEST = -126.0
"""2 to this is the smallest normal float32; less is as good as nothing beside the row's largest weight, which is 1."""

Value = Any
Arguments = ParamSpec("Arguments")


def emitted(emit: Callable[Concatenate[Any, Arguments], None]) -> Callable[Arguments, None]:
    """A function for compiled code that is what `emit(builder, *arguments)` writes; it returns nothing.

    Written once a caller, and not inlined: copies in every branch of a loop would take seconds to compile.
    """
    name = f"{emit.__module__}.{emit.__qualname__}"

    def call_it(builder: Any, *arguments: Value) -> None:
        kind = ir.FunctionType(ir.VoidType(), [INT64] * len(arguments))
        function = builder.module.globals.get(name)
        if function is None:
            function = ir.Function(builder.module, kind, name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            body = ir.IRBuilder(function.append_basic_block())
            write: Callable[..., None] = emit
            write(body, *function.args)
            body.ret_void()
        builder.call(function, arguments)

    return _written(call_it, types.void)


def inline(emit: Callable[Concatenate[Any, Arguments], None]) -> Callable[Arguments, None]:
    """The same for a few instructions, inlined."""
    return _written(emit, types.void)


def inline_integer(emit: Callable[Concatenate[Any, Arguments], Value]) -> Callable[Arguments, int]:
    """The same, returning an int64; inlined."""
    return _written(emit, types.int64)


def _written(emit: Callable[..., Any], result: Any) -> Any:
    @intrinsic
    def written(typing_context: Any, *arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value = emit(builder, *(cgutils.unpack_tuple(builder, values[0]) if arguments else ()))
            return context.get_dummy_value() if value is None else value

        return result(types.StarArgTuple(arguments)), generate

    return written


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer, for `numba.carray`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.PointerType(ir.IntType(8)))

    return types.voidptr(types.int64), generate


@inline_integer
def read_integer(builder: Any, address: Value) -> Value:
    """The int64 at an address."""
    return load(builder, address, 0, INT64)


@inline_integer
def fetch_add(builder: Any, address: Value) -> Value:
    """The int64 at an address, atomically raised by one: each caller on any thread gets another."""
    counter = builder.inttoptr(address, ir.PointerType(INT64))
    return builder.atomic_rmw("add", counter, ir.Constant(INT64, 1), "monotonic")


def call(builder: Any, name: str, result: Any, *values: Value) -> Value:
    """Call an LLVM intrinsic by its full name."""
    declared = builder.module.globals.get(name)
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(declared or ir.Function(builder.module, kind, name), values)


def at(builder: Any, address: Value, offset: Value | int, kind: Any) -> Value:
    """A pointer to `kind`, `offset` bytes after `address`."""
    step = ir.Constant(INT64, offset) if isinstance(offset, int) else offset
    return builder.inttoptr(builder.add(address, step), ir.PointerType(kind))


def load(builder: Any, address: Value, offset: Value | int = 0, kind: Any = FLOATS) -> Value:
    return builder.load(at(builder, address, offset, kind), align=2)


def store(builder: Any, vector: Value, address: Value, offset: Value | int = 0) -> None:
    builder.store(vector, at(builder, address, offset, vector.type), align=2)


def words(number: int) -> Value:
    """The same 32 bits in every lane."""
    return ir.Constant(WORDS, [number] * LANES)


def floats(number: float) -> Value:
    """The same number in every lane."""
    return ir.Constant(FLOATS, [number] * LANES)


def broadcast(builder: Any, number: Value) -> Value:
    """An int64 as 32 bits in every lane."""
    one = builder.insert_element(words(0), builder.trunc(number, _INT32), ir.Constant(_INT32, 0))
    return builder.shuffle_vector(one, words(0), words(0))


def transposed(builder: Any, rows: Sequence[Value]) -> list[Value]:
    """Sixteen vectors as columns of what they were rows of: four rounds that swap parts of twice the size each."""
    rows, size = list(rows), 1
    while size < LANES:
        swapped = list(rows)
        for upper in (i for i in range(LANES) if not i & size):
            lower = upper | size
            first = [lane if not lane & size else LANES + (lane ^ size) for lane in range(LANES)]
            second = [lane | size if not lane & size else LANES + lane for lane in range(LANES)]
            swapped[upper] = builder.shuffle_vector(rows[upper], rows[lower], ir.Constant(WORDS, first))
            swapped[lower] = builder.shuffle_vector(rows[upper], rows[lower], ir.Constant(WORDS, second))
        rows, size = swapped, 2 * size
    return rows


def as_bfloat16(builder: Any, vector: Value) -> Value:
    """Float32 rounded to the nearest bfloat16, ties to even, as 16-bit lanes. NaN stays NaN."""
    bits = builder.bitcast(vector, WORDS)
    odd = builder.and_(builder.lshr(bits, words(16)), words(1))
    nearest = builder.lshr(builder.add(builder.add(bits, words(0x7FFF)), odd), words(16))
    is_nan = builder.fcmp_unordered("uno", vector, vector)
    return builder.trunc(builder.select(is_nan, words(0x7FC0), nearest), HALVES)


def from_bfloat16(builder: Any, vector: Value) -> Value:
    """Sixteen bfloat16, as their bits, in float32."""
    return builder.bitcast(builder.shl(builder.zext(vector, WORDS), words(16)), FLOATS)


def exp2(builder: Any, vector: Value) -> Value:
    """2 to the power of each lane; 0 below -126. NaN stays NaN."""
    small = builder.fcmp_ordered("<", vector, floats(_SMALLEST))
    exponent = builder.select(small, floats(_SMALLEST), vector)
    shifted = builder.fadd(exponent, floats(_ROUND))
    rest = builder.fsub(exponent, builder.fsub(shifted, floats(_ROUND)))
    power = floats(_EXP2[-1])
    for coefficient in _EXP2[-2::-1]:
        power = multiply_add(builder, power, rest, floats(coefficient))
    scale = builder.shl(builder.bitcast(shifted, WORDS), words(23))
    scaled = builder.bitcast(builder.add(builder.bitcast(power, WORDS), scale), FLOATS)
    return builder.select(small, floats(0.0), scaled)


def multiply_add(builder: Any, a: Value, b: Value, c: Value) -> Value:
    """`a * b + c`, rounded once."""
    return call(builder, "llvm.fma.v16f32", FLOATS, a, b, c)


def larger(builder: Any, a: Value, b: Value) -> Value:
    """The larger of each lane; of `a` NaN and `b`, `b`."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)
