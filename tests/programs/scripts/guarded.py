"""Model, optimizer, loader, data set, sampler and batches override many methods that only this program and torch may call.

The methods raise if other code calls them. With the word `open`, nothing is overridden.
"""

import pathlib
import sys

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

IS_OPEN = "open" in sys.argv
HERE, TORCH = (str(pathlib.Path(each).resolve().parent) for each in (__file__, torch.__file__))
MODULE = (
    *("parameters", "named_parameters", "buffers", "named_buffers", "children", "named_children", "modules", "named_modules"),
    *("to", "cpu", "cuda", "float", "bfloat16", "apply", "_apply", "compile", "state_dict", "load_state_dict", "zero_grad"),
    *("train", "eval", "requires_grad_", "register_forward_pre_hook", "register_forward_hook", "get_parameter", "extra_repr"),
    *("__bool__", "__len__", "__iter__", "__getitem__", "__contains__", "__eq__", "__hash__", "__getattr__", "__repr__"),
)
OPTIMIZER = (
    *("state_dict", "load_state_dict", "zero_grad", "add_param_group", "register_step_pre_hook", "register_step_post_hook"),
    *("__bool__", "__len__", "__iter__", "__eq__", "__hash__", "__getattr__", "__repr__"),
)
DATA = ("__bool__", "__iter__", "__getitem__", "__eq__", "__hash__", "__getattr__", "__repr__")
SAMPLER = ("__bool__", "__len__", "__eq__", "__hash__", "__getattr__", "__repr__")
LOADER = ("__bool__", "__len__", "__eq__", "__hash__", "__getattr__", "__repr__")
BATCH = (
    "__bool__",
    "__len__",
    "__iter__",
    "__getitem__",
    "__eq__",
    "__getattr__",
    "__repr__",
    "shape",
    "keys",
    "values",
    "items",
)
TENSOR = (
    *("to", "cpu", "cuda", "float", "bfloat16", "contiguous", "is_contiguous", "detach", "clone", "item", "tolist", "numpy"),
    *("dim", "size", "numel", "stride", "flatten", "unique", "is_floating_point", "shape", "dtype", "ndim", "pin_memory"),
    *("__bool__", "__len__", "__iter__", "__getitem__", "__float__", "__eq__", "__hash__", "__repr__", "__deepcopy__"),
)


class Refused(BaseException):
    """Raised for a forbidden call; not an Exception, so that `except Exception` cannot hide it."""


def guarded(names, *, is_deep=False):
    """Returns a class decorator that lets only this program and torch call the methods `names`.

    With `is_deep`, torch may call them only while the program calls torch.
    """

    def decorate(kind):
        for name in () if IS_OPEN else names:
            setattr(kind, name, guard(name, getattr(kind, name, None), is_deep))
        return kind

    return decorate


def guard(name, own, is_deep):
    def method(self, *args, **kwargs):
        frame = sys._getframe(1)
        while is_deep and frame.f_back and frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
        if not frame.f_code.co_filename.startswith((HERE, TORCH)):
            raise Refused(f"{type(self).__name__}.{name} is called by {frame.f_code.co_filename}:{frame.f_lineno}")
        if own is None:
            raise AttributeError(name)
        return own(self, *args, **kwargs) if callable(own) else own.__get__(self)

    return method if own is None or callable(own) else property(method, lambda self, value: own.__set__(self, value))


@guarded(TENSOR)
class Images(torch.Tensor):
    pass


@guarded(BATCH)
class Batch(list):
    def __reduce__(self):  # for batches from a worker
        return Batch, ([*list.__iter__(self)],)


@guarded(DATA)
class Data(Dataset):
    def __init__(self):
        self.images = torch.rand(240, 3, 8, 8)

    def __len__(self):
        return 240

    def __getitem__(self, index):
        return self.images[index], index % 2


@guarded(SAMPLER)
class Order(Sampler):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(torch.randperm(self.length).tolist())


@guarded(LOADER)
class Loader(DataLoader):
    pass


@guarded(OPTIMIZER)
class Descent(torch.optim.SGD):
    pass


@guarded(MODULE, is_deep=True)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.turn(x).relu()


@guarded(MODULE, is_deep=True)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 2)
        self.body = nn.Sequential(Block(), Block())

    def forward(self, x):
        hidden = self.first(x)
        journal.inside(x, hidden)
        return self.head(self.body(hidden).mean((2, 3)))


def collate(items):
    images = torch.stack([image for image, _ in items]).as_subclass(Images)
    return Batch([images, torch.tensor([label for _, label in items])])


torch.manual_seed(0)
data = Data()
loader = Loader(data, batch_size=12, sampler=Order(240), collate_fn=collate)
model = Net()
optimizer = Descent([*model.parameters()], lr=0.01)
while True:
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        journal.step(loss, len(labels), optimizer)
