"""Authentication and authorisation: certificates, signatures, policies, spaces and revocation."""
