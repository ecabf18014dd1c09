"""Scripts that train the bundled models from permissively licensed Python source."""
