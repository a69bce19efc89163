"""The whole configuration: one tree of frozen values, one loader, one linter.

    schema             the members of the file, and their documentation
    loader             reads a file, the environment and flags into one Config, or reports every problem
    convert            converts plain values to the schema
    presets            short forms of collections of Parquet files
    validation         rules beyond types
    plugin_validation  rules of projections and events
    overlaps           finds access that templates with common keys, or projections, give to others
    key_templates      key templates
    routes             the routes that a configuration makes
    derived            values that follow from several members: limits, the coordinator, media types
    lint               warns about settings that are accepted and probably not meant
    report             the output of `pysync check`

The environment is read here and nowhere else. `lint` and `report` are imported by the commands
that need them.

See docs/reference/configuration.md.

"""

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
    Action,
    AppendOnly,
    Auth,
    ChangeRetention,
    Collection,
    Config,
    ConfigEndpoint,
    Cors,
    Encryption,
    EventsConfig,
    FieldPermission,
    Limit,
    Namespace,
    ProjectionConfig,
    RateLimit,
    RateLimitKey,
    RateRule,
    Restriction,
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
