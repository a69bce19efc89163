"""The whole configuration: one tree of frozen values, one loader, one linter.

    schema             the members of the file, and their documentation
    collection         collections and their members, also the short forms for Parquet files
    loader             reads a file, the environment and flags into one Config, or reports every problem
    convert            converts plain values to the schema
    validation         rules beyond types
    plugin_validation  rules of projections and events
    overlaps           finds access that templates with common keys, or projections, give to others
    key_templates      key templates
    routes             the routes that a configuration makes
    derived            values that follow from several members: limits, the coordinator, media types
    check              `pysync check`: every problem, or warnings and the route table

The environment is read here and nowhere else. See docs/reference/configuration.md.
"""

from pysync.config.collection import (
    Action,
    AppendOnly,
    Collection,
    Encryption,
    FieldPermission,
    Limit,
    RateLimit,
    RateLimitKey,
    RateRule,
    Restriction,
)
from pysync.config.derived import (
    S3Location,
    Trust,
    database_paths,
    effective_coordinator,
    effective_limit,
    every_named_identity,
    every_role,
    every_trusted_issuer,
    is_multi_process,
    redacted_coordinator,
    s3_location,
    trust_of,
)
from pysync.config.loader import load, parse
from pysync.config.problem import ConfigError, Problem
from pysync.config.schema import (
    Auth,
    ChangeRetention,
    Config,
    ConfigEndpoint,
    Cors,
    EventsConfig,
    Namespace,
    ProjectionConfig,
    ScrubConfig,
    Server,
    SpacesConfig,
    StoreConfig,
)

__all__ = [
    "Action",
    "AppendOnly",
    "Auth",
    "ChangeRetention",
    "Collection",
    "Config",
    "ConfigEndpoint",
    "ConfigError",
    "Cors",
    "Encryption",
    "EventsConfig",
    "FieldPermission",
    "Limit",
    "Namespace",
    "Problem",
    "ProjectionConfig",
    "RateLimit",
    "RateLimitKey",
    "RateRule",
    "Restriction",
    "S3Location",
    "ScrubConfig",
    "Server",
    "SpacesConfig",
    "StoreConfig",
    "Trust",
    "database_paths",
    "effective_coordinator",
    "effective_limit",
    "every_named_identity",
    "every_role",
    "every_trusted_issuer",
    "is_multi_process",
    "load",
    "parse",
    "redacted_coordinator",
    "s3_location",
    "trust_of",
]
