"""The models that the acceptance tests serve."""

from tests.acceptance.conftest import tiny_models  # noqa: F401 (a fixture)
