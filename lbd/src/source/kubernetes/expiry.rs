//! Until when credentials are good.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use kube::config::AuthInfo;
use x509_parser::pem::Pem;

/// Seconds before the end at which somebody must be told, at most.
const WARNING: i64 = 14 * 24 * 3600;
/// What is renewed all the time is told of only in this last part of its life.
const LAST_PART: i64 = 6;

/// When credentials begin and end to be good, in seconds since the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// First second, if said.
    pub since: Option<i64>,
    /// Last second.
    pub until: i64,
}

impl Validity {
    /// Of a kubeconfig's user, with the contents of the files that it names; `None` = for ever, as far as is known.
    pub(super) fn of(user: &AuthInfo) -> Option<Self> {
        // The only way to a token is the way into a file.
        let fields = serde_json::to_value(user).unwrap_or_default();
        let inline = |key: &str| fields.get(key)?.as_str().map(str::to_owned);
        let file = |path: &Option<String>| std::fs::read(path.as_ref()?).ok();
        let certificate = match inline("client-certificate-data") {
            Some(data) => STANDARD.decode(data.trim()).ok(),
            None => file(&user.client_certificate),
        };
        // As the client does: the file counts for more.
        let token = file(&user.token_file).and_then(|bytes| String::from_utf8(bytes).ok()).or_else(|| inline("token"));
        let of_certificate = certificate.and_then(|pem| Self::of_certificate(&pem));
        let of_token = token.and_then(|token| Self::of_token(token.trim()));
        of_certificate.into_iter().chain(of_token).min_by_key(|validity| validity.until)
    }

    fn of_certificate(pem: &[u8]) -> Option<Self> {
        let first = Pem::iter_from_buffer(pem).filter_map(Result::ok).find(|pem| pem.label == "CERTIFICATE")?;
        let certificate = first.parse_x509().ok()?;
        let validity = certificate.validity();
        Some(Self { since: Some(validity.not_before.timestamp()), until: validity.not_after.timestamp() })
    }

    /// Of a JSON web token. Its signature is the server's business.
    fn of_token(token: &str) -> Option<Self> {
        let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
        let claims: serde_json::Value = serde_json::from_slice(&claims).ok()?;
        Some(Self { since: claims["iat"].as_i64(), until: claims["exp"].as_i64()? })
    }

    /// Whether it is time to renew them.
    pub fn ends_soon(self, now: i64) -> bool {
        let life = self.since.map_or(i64::MAX, |since| self.until.saturating_sub(since));
        self.until.saturating_sub(now) < WARNING.min(life / LAST_PART)
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    const DAY: i64 = 24 * 3600;
    /// 2026-12-01.
    const DECEMBER: i64 = 1_796_083_200;

    fn user(text: &str) -> AuthInfo {
        serde_saphyr::from_str(text).unwrap()
    }

    fn certificate() -> String {
        let mut parameters = CertificateParams::new(vec!["lbd".to_owned()]).unwrap();
        (parameters.not_before, parameters.not_after) = (date_time_ymd(2025, 12, 1), date_time_ymd(2026, 12, 1));
        parameters.self_signed(&KeyPair::generate().unwrap()).unwrap().pem()
    }

    fn token(claims: &str) -> String {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims))
    }

    #[test]
    fn b43_the_end_of_certificates_and_tokens_is_known() {
        let year = Validity { since: Some(DECEMBER - 365 * DAY), until: DECEMBER };
        let pem = certificate();
        let inline = format!("client-certificate-data: {}", STANDARD.encode(&pem));
        assert_eq!(Validity::of(&user(&inline)), Some(year));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("text before it\n{pem}")).unwrap();
        assert_eq!(Validity::of(&user(&format!("client-certificate: {}", file.path().display()))), Some(year));
        let short = token(r#"{"iat":1000,"exp":4600}"#);
        let hour = Validity { since: Some(1000), until: 4600 };
        assert_eq!(Validity::of(&user(&format!("token: {short}"))), Some(hour));
        // Of two, what ends first.
        assert_eq!(Validity::of(&user(&format!("{inline}\ntoken: {short}"))), Some(hour));
        std::fs::write(file.path(), format!("{}\n", token(r#"{"exp":9000}"#))).unwrap();
        let of_file = Validity::of(&user(&format!("token: {short}\ntokenFile: {}", file.path().display())));
        assert_eq!(of_file, Some(Validity { since: None, until: 9000 }));
        for opaque in ["token: opaque", "token: a.b.c", "client-certificate-data: '!'", "tokenFile: /nowhere", "{}"] {
            assert_eq!(Validity::of(&user(opaque)), None, "{opaque}");
        }
    }

    #[test]
    fn b43_the_end_is_told_two_weeks_before_but_not_of_what_is_renewed_hourly() {
        let year = Validity { since: Some(0), until: 365 * DAY };
        assert!(!year.ends_soon(350 * DAY) && year.ends_soon(358 * DAY) && year.ends_soon(400 * DAY));
        let unknown = Validity { since: None, until: 365 * DAY };
        assert!(!unknown.ends_soon(350 * DAY) && unknown.ends_soon(358 * DAY));
        let hour = Validity { since: Some(0), until: 3600 };
        assert!(!hour.ends_soon(2900) && hour.ends_soon(3100));
    }
}
