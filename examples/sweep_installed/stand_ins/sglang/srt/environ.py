"""Settings, all off."""


class _Off:
    def get(self) -> bool:
        return False


class _Settings:
    def __getattr__(self, name: str) -> _Off:
        return _Off()


envs = _Settings()
