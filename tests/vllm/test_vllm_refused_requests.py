"""Empty: the engine refuses no request that placement holds back."""
