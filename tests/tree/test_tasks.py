"""Every task has an owner: the result of `create_task` and `ensure_future` is stored or awaited where it is made.

An event loop holds only weak references to its tasks, and no code cancels or awaits a task without an owner when a
program stops. `rmqkit.remoting.tasks.Tasks` owns tasks that return by themselves.
"""

from __future__ import annotations

import ast

import pytest

from tests.sources import modules, place

STARTS = ("create_task", "ensure_future")
KEEPS = ("add", "append", "push_async_callback")
"""Methods of objects that become the owner of their argument."""
KEPT = tuple(f".{name}" for name in KEEPS)


def ownerless(source: str) -> list[int]:
    """Return the lines that start a task without an owner."""
    if not any(name in source for name in STARTS):
        return []
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    return [
        call.lineno
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in STARTS
        and not is_task_group(call, parents)
        and not has_owner(call, parents)
    ]


def function_of(node, parents):
    while node in parents and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        node = parents[node]
    return node


def is_task_group(call, parents):
    """Return True if the call is of a TaskGroup, which awaits its tasks itself."""
    receiver = ast.unparse(call.func.value)
    opened = [
        item
        for node in ast.walk(function_of(call, parents))
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if item.optional_vars is not None and ast.unparse(item.context_expr) == "asyncio.TaskGroup()"
    ]
    return any(ast.unparse(item.optional_vars) == receiver for item in opened)


def has_owner(call, parents):
    node = call
    while not isinstance(node, ast.stmt):
        node = parents[node]
        if isinstance(node, ast.Await) and not is_shield(node.value):
            return True
        if isinstance(node, ast.Call) and call in node.args and ast.unparse(node.func).endswith(KEPT):
            return True
    if not isinstance(node, ast.Assign):
        return False
    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    return any(not isinstance(target, ast.Name) for target in node.targets) or any(
        is_stored_or_awaited(name, function_of(call, parents)) for name in names
    )


def is_shield(node):
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("shield")


def is_stored_or_awaited(name, function):
    """Return whether a function stores the task of a local variable in an object, or awaits it."""
    return any(keeps(node, name) for node in ast.walk(function))


def keeps(node, name):
    if isinstance(node, ast.Await):
        return not is_shield(node.value) and holds(node.value, name)
    if isinstance(node, ast.Assign):
        is_object = any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
        return is_object and holds(node.value, name)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEEPS:
        return any(holds(argument, name) for argument in node.args)
    return False


def holds(tree, name):
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))


def test_every_task_in_the_sources_has_an_owner():
    found = [f"{place(path)}:{line}" for path in modules() for line in ownerless(path.read_text())]
    assert found == [], "give each task to an owner that awaits or cancels it, such as remoting.tasks.Tasks"


@pytest.mark.parametrize(
    "body",
    [
        "asyncio.create_task(work())",
        "asyncio.ensure_future(work())",
        "loop.create_task(work()).add_done_callback(print)",
        "task = asyncio.create_task(work())",
        "task = asyncio.create_task(work()); task.add_done_callback(print)",
        "task = asyncio.ensure_future(work()); await asyncio.shield(task)",
        "return asyncio.ensure_future(work())",
    ],
)
def test_a_task_without_an_owner_is_found(body):
    assert ownerless(f"async def start(loop):\n    {body}\n") == [2]


@pytest.mark.parametrize(
    "body",
    [
        "self._task = asyncio.create_task(work())",
        "task = self._tasks[key] = asyncio.create_task(work())",
        "self._tasks.append(asyncio.create_task(work()))",
        "task = asyncio.create_task(work()); self._tasks.add(task)",
        "task = asyncio.create_task(work()); await asyncio.wait([task])",
        "async with asyncio.TaskGroup() as tasks: tasks.create_task(work())",
    ],
)
def test_a_task_with_an_owner_passes(body):
    assert ownerless(f"async def start(self):\n    {body}\n") == []
