"""The SDK that quantization methods are built from.

CheckedMethod       a whole method, but for its schemes
OneOf               one name for several methods, of which the checkpoint's format chooses
chosen, targeted    which layers the names and expressions in a configuration mean
Quantized           a scheme that says what a layer's tensors stand for; they are laid out and multiplied here:
Integers              integers of 1 to 8 bits with scales, for all inputs or for groups, with zero points or offsets
Rounded               floats that become such integers
Levelled              integers in a form of the CPU's kernel
Fp8                   numbers of 8 bits in floating point, with scales of rows or of blocks
Tables                places in tables
Wide                  floats, where no kernel multiplies fewer bits
Products            what multiplies by them, by torch; a platform's part of `Kernels` derives from it
CodedScheme         a scheme of `Coded`: codes of 4 bits, each a place in a table of 16, with scales of groups
Float4Scheme        a scheme of nvfp4 and mxfp4, as compressed-tensors, ModelOpt and Quark write them
Fp8Scheme           a scheme of fp8 with scales of blocks, outputs or the matrix
Int8Scheme          a scheme of integers of 8 bits, as these write them
Online              a scheme of floats that are rounded as they load, to a `Form`; Fp8FromFloats: to fp8
Grouped             a scheme of words of few bits in groups, whose parameters a format names; Settings: of one layer
Smoothed            a scheme of layers whose inputs are scaled
side_by_side        the scheme of a merged layer whose projections are quantized in different ways
scale_parameter, decoded_parameter  parameters whose tensors are spread or decoded as they load
unpacked, per_words words of several numbers
"""

from ferrule_kernels.matmul import Form, Levels
from ferrule_kernels.tables import Additive, Palette
from ferrule_quant.code_tables import E2M1, Coded, CodedScheme, halves, powers_of_two
from ferrule_quant.decoded_parameters import DecodedParameter, decoded_parameter
from ferrule_quant.float4 import Float4Scheme
from ferrule_quant.fp8 import Fp8FromFloats, Fp8Scheme
from ferrule_quant.groupwise import Grouped, Settings
from ferrule_quant.integers import Int8Scheme
from ferrule_quant.method import CheckedMethod, OneOf, check_cache_scheme
from ferrule_quant.mixed_projections import Apart, side_by_side
from ferrule_quant.names import chosen, listed, matches, means, names_of, spellings, targeted
from ferrule_quant.online import Online
from ferrule_quant.packed_words import (
    AWQ_ORDER,
    AWQ_ORDER_8,
    check_words,
    in_order,
    outputs,
    per_words,
    unpacked,
    unpacked_planes,
)
from ferrule_quant.products import (
    FP8_FORM,
    Floats,
    Fp8,
    Products,
    Quantized,
    Rounded,
    Shared,
    Tables,
    Wide,
    check_scales,
    checked,
    fitting,
    has_room,
    kept,
    products_of,
)
from ferrule_quant.row_chunks import in_chunks
from ferrule_quant.scales import Smoothed, check_groups, scale_parameter
from ferrule_quant.weights import Integers, Levelled

__all__ = [
    "AWQ_ORDER",
    "AWQ_ORDER_8",
    "E2M1",
    "FP8_FORM",
    "Additive",
    "Apart",
    "CheckedMethod",
    "Coded",
    "CodedScheme",
    "DecodedParameter",
    "Float4Scheme",
    "Floats",
    "Form",
    "Fp8",
    "Fp8FromFloats",
    "Fp8Scheme",
    "Grouped",
    "Int8Scheme",
    "Integers",
    "Levelled",
    "Levels",
    "OneOf",
    "Online",
    "Products",
    "Palette",
    "Quantized",
    "Rounded",
    "Settings",
    "Shared",
    "Smoothed",
    "Tables",
    "Wide",
    "check_cache_scheme",
    "check_groups",
    "check_scales",
    "check_words",
    "checked",
    "chosen",
    "decoded_parameter",
    "fitting",
    "halves",
    "has_room",
    "in_chunks",
    "in_order",
    "kept",
    "listed",
    "matches",
    "means",
    "names_of",
    "outputs",
    "per_words",
    "powers_of_two",
    "products_of",
    "scale_parameter",
    "side_by_side",
    "spellings",
    "targeted",
    "unpacked",
    "unpacked_planes",
]
