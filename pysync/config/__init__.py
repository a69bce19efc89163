"""The whole configuration: one tree of frozen values, one loader, one linter.

    schema             the members of the file, their documentation, and values that follow from them
    collection         collections and their members, also the short forms for Parquet files
    loader             reads a file, the environment and flags into one Config, or reports every problem
    convert            converts plain values to the schema
    validation         rules beyond types
    plugin_validation  rules of projections and events
    webhooks           webhooks and their rules
    overlaps           finds access that templates with common keys, or projections, give to others
    key_templates      key templates
    routes             the routes that a configuration makes
    check              `pysync check`: every problem, or warnings and the route table

The environment is read here and nowhere else. See docs/reference/configuration.md.
"""

from pysync.config.collection import (
    Action,
    AppendOnly,
    Collection,
    FieldPermission,
    HistoryConfig,
    Limit,
    RateLimit,
    RateRule,
    Restriction,
)
from pysync.config.loader import load, parse
from pysync.config.problem import ConfigError, Problem
from pysync.config.schema import (
    BackupConfig,
    Config,
    EventsConfig,
    ProjectionConfig,
    S3Location,
    ScrubConfig,
    Server,
    SpacesConfig,
    StoreConfig,
    Trust,
)
from pysync.config.webhooks import WebhookConfig

__all__ = [
    "Action",
    "AppendOnly",
    "BackupConfig",
    "Collection",
    "Config",
    "ConfigError",
    "EventsConfig",
    "FieldPermission",
    "HistoryConfig",
    "Limit",
    "Problem",
    "ProjectionConfig",
    "RateLimit",
    "RateRule",
    "Restriction",
    "S3Location",
    "ScrubConfig",
    "Server",
    "SpacesConfig",
    "StoreConfig",
    "Trust",
    "WebhookConfig",
    "load",
    "parse",
]
