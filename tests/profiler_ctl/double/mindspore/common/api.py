"""The executor, whose work is always done."""


class _Executor:
    def sync(self) -> None:
        """Nothing is ever launched."""


_pynative_executor = _Executor()
