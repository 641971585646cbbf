"""The fixes of errors work: all names in them exist, and dlx converts their results."""

from __future__ import annotations

import functools
import re
import warnings

import pytest
from support.errors import advice
from support.errors.refused import CASES, modules
from support.project import ROOT

import dlx
from dlx import errors


def refusal(obj, case):
    """Return the error of a case's call, or of the first column that is refused."""
    try:
        getattr(dlx, case.action)(obj, to=case.to, **case.options)
    except errors.DlxError as error:
        return error
    return None


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_the_advice_can_be_followed(name):
    """Methods, functions and options exist on the real object; dlx accepts the result of one of the expressions."""
    case = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = modules(case.needs, lambda module: pytest.importorskip(module, exc_type=ImportError))
        obj = case.make(**found)
        error = refusal(obj, case)
        assert error is not None, "it is converted now: take the case out"
        for key in error.path:  # of a column
            obj = obj[key] if hasattr(obj, "__getitem__") and error.fix[:4] != "With" else obj
        results = advice.tried(error.fix, obj)
        advice.check_options(error.fix, error.action)
        assert not case.works or any(_converts(result) for result in results), (error.fix, results)


def _converts(result):
    """Return whether dlx converts the result of the advice."""
    if isinstance(result, (str, bytes, int, float)):
        return False
    try:
        made = dlx.convert(result, to="dlx")
    except errors.DlxError:
        return False
    return made is not result or isinstance(made, dlx.Tensor)


@pytest.mark.parametrize(
    "text",
    [
        "Call .no_such() first.",
        "Call .real.no_such first.",
        "Convert its .real and its .no_such apart.",
        "Call numpy.no_such(x) first.",
        "Call no_such_module.call(x) first.",
        "Convert {name: x[name].data for name in x.no_such}.",
        "With x = numpy.no_such(it), call x.sum().",
        "With x = numpy.asarray(it), call x.no_such().",
        "Call .sum(no_such=1) first.",
        "Read x[...].no_such.",
    ],
)
def test_a_wrong_method_is_noticed(np, text):
    """A wrong method is detected by its name, even after other calls."""
    with pytest.raises(AssertionError):
        advice.tried(text, np.ones(3))


@pytest.mark.parametrize(
    "text",
    ["Pass no_such=True.", "Leave no_such= out.", "Call dlx.convert(x, no_such=1).", "Say dlx.using(..., no=1)."],
)
def test_a_wrong_option_is_noticed(text):
    """One that the function lacks."""
    with pytest.raises(AssertionError):
        advice.check_options(text)


@pytest.mark.parametrize(
    "text",
    [
        "Pass detach=True.",
        "Drop copy=False, or pass readonly='share'.",
        "Call dlx.convert(tensor, to='numpy'), which copies it to the host.",
        "Say dlx.using(..., detach=True) to do without.",
    ],
)
def test_a_right_option_passes(text):
    """Options that the function has are accepted."""
    advice.check_options(text)


def test_what_right_advice_gives(np):
    """Each expression's value."""
    array = np.ones((2, 2))
    made = advice.tried("Call .sum() first, else convert its .T.copy() and numpy.ravel(x) apart, .astype('i4').", array)
    assert [np.shape(each) for each in made] == [(), (2, 2), (4,), (2, 2)]


def borrow(obj, **options):
    """Borrow an array."""
    with dlx.borrow(obj, **options):
        pass


def attach(**options):
    """Attach read-only memory."""
    with dlx.share(b"abc") as handle:
        return dlx.attach(handle, **options)


OPTIONS = {  # calls whose errors name an option
    "borrow": lambda torch: borrow(b"abc"),
    "borrow gradients": lambda torch: borrow(torch.ones(2, requires_grad=True)),
    "borrow a copy": lambda torch: borrow(torch.ones(2, dtype=torch.complex64).conj()),
    "to_capsule": lambda torch: dlx.to_capsule(b"abc"),
    "to_capsule gradients": lambda torch: dlx.to_capsule(torch.ones(2, requires_grad=True)),
    "convert": lambda torch: dlx.convert(torch.ones(2, requires_grad=True), to="dlx"),
    "convert without a copy": lambda torch: dlx.convert(b"abc", to="torch", copy=False),
    "convert for reading": lambda torch: dlx.convert(b"abc", to="torch", readonly="error"),
    "from_dlpack": lambda torch: dlx.from_dlpack(torch.ones(2, requires_grad=True)),
    "describe": lambda torch: dlx.describe([1]),
    "share": lambda torch: dlx.share(torch.ones(2, requires_grad=True)),
    "attach": lambda torch: attach(to="torch", readonly="error"),
    "stack": lambda torch: dlx.stack([torch.ones(2, requires_grad=True)], to="numpy"),
    "shares_memory": lambda torch: dlx.shares_memory(torch.ones(2, device="meta"), b""),
    "using": lambda torch: dlx.using("dlx")(lambda a: a)(torch.ones(2, requires_grad=True)),
    "like": lambda torch: dlx.convert(b"abc", like=object()),
    "parts": lambda torch: dlx.parts(torch.eye(2).to_sparse().requires_grad_(), to="numpy"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_are_those_of_the_function(torch, name):
    """The advice for each function names only its options, or another function."""
    with pytest.raises(errors.DlxError) as caught:
        OPTIONS[name](torch)
    assert caught.value.fix
    advice.check_options(caught.value.fix, caught.value.action)


@pytest.mark.parametrize(
    ("call", "end"),
    [
        (lambda x: dlx.convert(x, to="jax"), ""),
        (lambda x: dlx.stack([x, x], to="jax"), ""),
        (lambda x: dlx.attach(dlx.share(x), to="jax"), " to dlx.convert(x, to=...) first"),
        (lambda x: dlx.using("jax")(lambda a: a)(x), " to dlx.convert(x, to=...) first"),
    ],
    ids=["convert", "stack", "attach", "using"],
)
def test_a_dtype_is_advised_where_it_is_an_option(np, call, end):
    """Functions without ``dtype=`` name `dlx.convert`."""
    if pytest.importorskip("jax").config.jax_enable_x64:
        pytest.skip("jax has float64")
    with pytest.raises(errors.DTypeError) as caught:
        call(np.ones(2))
    assert caught.value.fix.startswith(f"Pass dtype='float32'{end}. Or call jax.config.update(")


# ---- every text ------------------------------------------------------------------------------------------------------

WITHOUT_A_CASE = {  # an expression that no case provokes -> the class that it is a method of; None: see the comment
    ".as_tensor()": "nvidia.dali.backend:TensorListCPU",
    ".asnumpy()": None,  # advice for classes that have it
    ".astype": "numpy:ndarray",
    ".backward()": "torch:Tensor",
    ".conj()": "torch:Tensor",
    ".conj().resolve_neg()": "torch:Tensor",
    ".contiguous()": "warp:indexedarray",
    ".cpu()": "torch:Tensor",
    ".cuda_stream": None,  # advice for streams that may have it
    ".full_tensor()": "torch.distributed.tensor:DTensor",
    ".imag": "torch:Tensor",
    ".numpy()": "onnxruntime:OrtValue",
    ".parameters()": "torch.nn:Module",  # mlx has it too
    ".ptr": None,  # advice for streams that may have it
    ".stack()": "tensorflow:TensorArray",
    ".to_dense()": "torch:Tensor",
    ".to_dict()": "tensordict:TensorDict",
    ".to_local()": "torch.distributed.tensor:DTensor",
    ".to_tensor()": "tensorflow:RaggedTensor",
    ".view('uint16')": "numpy:ndarray",
    "Adapter.export": "dlx.adapter:Adapter",
    "batch.tensors": "nvidia.dali.pipeline:DataNode",
    "dataset[:]": None,  # of h5py's datasets
    "handle.filenos()": "dlx._sharing.handle:Handle",
    "list(batch.tensors)": None,  # of nvidia.dali's batches
    "list(it)": None,
    "value()": None,  # a class that is named
    # test_one_set_of_sources.py follows these two:
    "{leaf._v_name: leaf.read() for leaf in file.walk_nodes('/', 'Leaf')}": None,
    "{name: each[:].data for name, each in x.variables.items()}": None,
    "value(...)": None,
}
SPLIT = re.compile(r"value|\{[a-z]+\}|\{\}")


@functools.cache
def declared():
    """Return the advice in the source: for each text its file and expressions."""
    return {text: (path, found) for path, text, found in advice.declared(ROOT)}


def provoked():
    """Return the advice of all cases whose libraries are installed, and whether these are all cases."""
    fixes, complete = [], True
    for case in CASES.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                error = refusal(case.make(**modules(case.needs)), case)
            except ImportError:
                complete = complete and case.needs in ("tf", "paddle", "warp")
                continue
        fixes.append(error.fix if error is not None else "")
    return "\n".join(fixes), complete


@pytest.mark.filterwarnings("ignore")
def test_every_text_of_the_source_is_tried():
    """Text that begins with a module is checked by name; a method is provoked by a case, or has a class above."""
    fixes, complete = provoked()
    missing = []
    for text, (path, found) in declared().items():
        if "value" not in text:
            advice.check_calls(text)
        for expression in found:
            if advice.is_rooted(expression):
                advice.check_rooted(expression)
            elif expression in WITHOUT_A_CASE:
                if WITHOUT_A_CASE[expression] is not None:
                    advice.check_on_class(expression, WITHOUT_A_CASE[expression])
            elif not re.search(".*".join(map(re.escape, SPLIT.split(expression))), fixes):
                missing.append(f"{path.name}: {expression} of {text!r}")
    assert not (complete and missing), "\n".join(["these need a case, or a class:", *missing])


def test_the_source_has_such_texts():
    """The search finds some; otherwise the test above would check nothing."""
    assert len(declared()) > 80


def test_like_takes_an_array_of_a_target(np):
    """The error names the type of a scalar, a container or another object."""
    for like in (np.float32(1), np.datetime64(1, "s"), 1.5, "x", object(), [1]):
        with pytest.raises(errors.AdapterNotFoundError, match=r"like= is [\w.]+, not an array of a target. Pass to= "):
            dlx.convert(np.ones(2), like=like)
