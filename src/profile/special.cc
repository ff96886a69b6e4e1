// SPDX-License-Identifier: Apache-2.0
#include "profile/special.h"

#include <cmath>
#include <limits>
#include <span>

namespace kvpages {
namespace {

constexpr double kEpsilon = std::numeric_limits<double>::epsilon();
constexpr double kTiny = std::numeric_limits<double>::min();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kSqrtHalf = 0.70710678118654752440;
constexpr double kTwoPi = 6.28318530717958647693;
constexpr double kHalfLogTwoPi = 0.91893853320467274178;

// Coefficients lowest power first.
double Polynomial(std::span<const double> coefficients, double x) {
  double sum = 0;
  for (size_t i = coefficients.size(); i-- > 0;) sum = sum * x + coefficients[i];
  return sum;
}

// erf and erfc with the rational approximations of Cephes (S. Moshier, "Methods and Programs for Mathematical Functions",
// 1989): the published receipts were made with them, and a C library's own differ in the last bit from one another.
double Erfc(double x);

double Erf(double x) {
  static constexpr double kT[] = {5.55923013010394962768e4, 7.00332514112805075473e3, 2.23200534594684319226e3, 9.00260197203842689217e1,
                                  9.60497373987051638749e0};
  static constexpr double kU[] = {4.92673942608635921086e4, 2.26290000613890934246e4, 4.59432382970980127987e3, 5.21357949780152679795e2,
                                  3.35617141647503099647e1, 1};
  if (std::fabs(x) > 1) return 1 - Erfc(x);
  return x * Polynomial(kT, x * x) / Polynomial(kU, x * x);
}

double Erfc(double x) {
  static constexpr double kP[] = {5.57535335369399327526e2, 1.02755188689515710272e3, 9.34528527171957607540e2, 5.26445194995477358631e2,
                                  1.96520832956077098242e2, 4.86371970985681366614e1, 7.46321056442269912687e0, 5.64189564831068821977e-1,
                                  2.46196981473530512524e-10};
  static constexpr double kQ[] = {5.57535340817727675546e2, 1.65666309194161350182e3, 2.24633760818710981792e3, 1.82390916687909736289e3,
                                  9.75708501743205489753e2, 3.54937778887819891062e2, 8.67072140885989742329e1, 1.32281951154744992508e1,
                                  1};
  static constexpr double kR[] = {2.97886665372100240670e0, 7.40974269950448939160e0, 6.16021097993053585195e0,
                                  5.01905042251180477414e0, 1.27536670759978104416e0, 5.64189583547755073984e-1};
  static constexpr double kS[] = {3.36907645100081516050e0, 9.60896809063285878198e0, 1.70814450747565897222e1, 1.20489539808096656605e1,
                                  9.39603524938001434673e0, 2.26052863220117276590e0, 1};
  const double a = std::fabs(x);
  if (a < 1) return 1 - Erf(x);
  const double tail = std::exp(-a * a) * (a < 8 ? Polynomial(kP, a) : Polynomial(kR, a)) / (a < 8 ? Polynomial(kQ, a) : Polynomial(kS, a));
  return x < 0 ? 2 - tail : tail;
}

// log Gamma(x) - ((x - 1/2) log x - x + log(2 pi)/2): Stirling's series, DLMF 5.11.1. x >= 10.
double StirlingError(double x) {
  static constexpr double kSeries[] = {1.0 / 12,  -1.0 / 360,      1.0 / 1260, -1.0 / 1680,
                                       1.0 / 1188, -691.0 / 360360, 1.0 / 156,  -3617.0 / 122400};
  return Polynomial(kSeries, 1 / (x * x)) / x;
}

// m - log(1 + m), without cancellation near 0.
double MinusLog1p(double m) {
  if (std::fabs(m) > 0.25) return m - std::log1p(m);
  double term = m * m, sum = 0;
  for (int k = 2; k < 60; ++k) {
    const double next = sum + term / k;
    if (next == sum) break;
    sum = next;
    term *= -m;
  }
  return sum;
}

// x^a e^-x / Gamma(a + 1). From 10 up in the form of C. Loader, "Fast and accurate computation of binomial
// probabilities" (2000): the large terms cancel on paper and not in the machine.
double GammaWeight(double a, double x) {
  if (a < 10) return std::exp(a * std::log(x) - x - LogGamma(a + 1));
  return std::exp(-a * MinusLog1p((x - a) / a) - StirlingError(a)) / std::sqrt(kTwoPi * a);
}

// P (lower) or Q (upper) for large a: Temme's uniform expansion, DLMF 8.12.3, 8.12.4 and 8.12.7. Coefficients by
// series reversal of eta^2/2 = m - log(1 + m) in exact fractions; they agree with DiDonato and Morris (1986). Enough
// terms for a >= kTemme, where the weight has vanished before |eta| reaches 0.1.
constexpr double kTemme = 1e4;
double GammaUniform(double a, double x, bool upper) {
  static constexpr double kC0[] = {-1.0 / 3, 1.0 / 12, -2.0 / 135, 1.0 / 864, 0.0003527336860670194, -0.0001787551440329218,
                                   3.919263178522438e-05, -2.185448510679992e-06, -1.85406221071516e-06, 8.296711340953087e-07};
  static constexpr double kC1[] = {-1.0 / 540, -1.0 / 288, 0.0026455026455026454, -0.0009902263374485596, 0.00020576131687242798};
  static constexpr double kC2[] = {0.004133597883597883, -0.0026813271604938273};
  const double m = (x - a) / a;
  const double eta = std::copysign(std::sqrt(2 * MinusLog1p(m)), m);
  if (!(std::fabs(eta) < 1)) return (m > 0) == upper ? 0 : 1;
  const double half = 0.5 * Erfc((upper ? eta : -eta) * std::sqrt(a / 2));
  const double series = Polynomial(kC0, eta) + (Polynomial(kC1, eta) + Polynomial(kC2, eta) / a) / a;
  const double rest = std::exp(-a * eta * eta / 2) / std::sqrt(kTwoPi * a) * series;
  return upper ? half + rest : half - rest;
}

double GammaLower(double a, double x);

double GammaUpper(double a, double x) {
  if (a >= kTemme) return GammaUniform(a, x, true);
  if (x < a + 1) return 1 - GammaLower(a, x);
  // Continued fraction DLMF 8.9.2 by the modified Lentz method.
  double b = x + 1 - a, c = 1 / kTiny, d = 1 / b, h = d;
  for (int i = 1; i < 10000; ++i) {
    const double an = -i * (i - a);
    b += 2;
    d = an * d + b;
    if (std::fabs(d) < kTiny) d = kTiny;
    c = b + an / c;
    if (std::fabs(c) < kTiny) c = kTiny;
    d = 1 / d;
    h *= d * c;
    if (std::fabs(d * c - 1) < kEpsilon) break;
  }
  return GammaWeight(a, x) * a * h;
}

double GammaLower(double a, double x) {
  if (a >= kTemme) return GammaUniform(a, x, false);
  if (x >= a + 1) return 1 - GammaUpper(a, x);
  // Series DLMF 8.11.4.
  double term = 1, sum = 1;
  for (int n = 1; n < 10000 && term > sum * (kEpsilon / 4); ++n) {
    term *= x / (a + n);
    sum += term;
  }
  return GammaWeight(a, x) * sum;
}

}  // namespace

double NormalCdf(double x) {
  const double t = x * kSqrtHalf, magnitude = std::fabs(t);
  if (magnitude < 1) return 0.5 + 0.5 * Erf(t);
  const double tail = 0.5 * Erfc(magnitude);
  return t > 0 ? 1 - tail : tail;
}

// M. Wichura, "Algorithm AS 241: The percentage points of the normal distribution", PPND16 (1988).
double NormalQuantile(double p) {
  static constexpr double kA[] = {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
                                  4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3};
  static constexpr double kB[] = {1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
                                  2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3};
  static constexpr double kC[] = {1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
                                  1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4};
  static constexpr double kD[] = {1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
                                  1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9};
  static constexpr double kE[] = {6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
                                  2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7};
  static constexpr double kF[] = {1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
                                  7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15};
  if (!(p > 0)) return p == 0 ? -kInfinity : std::nan("");
  if (!(p < 1)) return p == 1 ? kInfinity : std::nan("");
  const double q = p - 0.5;
  if (std::fabs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * Polynomial(kA, r) / Polynomial(kB, r);
  }
  const double r = std::sqrt(-std::log(q < 0 ? p : 1 - p));
  const double z = r <= 5 ? Polynomial(kC, r - 1.6) / Polynomial(kD, r - 1.6) : Polynomial(kE, r - 5) / Polynomial(kF, r - 5);
  return q < 0 ? -z : z;
}

double Digamma(double x) {
  // Recurrence DLMF 5.5.2 up to 10, then the asymptotic series DLMF 5.11.2.
  double below = 0;
  for (; x < 10; x += 1) below += 1 / x;
  static constexpr double kSeries[] = {1.0 / 12, -1.0 / 120, 1.0 / 252, -1.0 / 240, 1.0 / 132, -691.0 / 32760, 1.0 / 12};
  const double square = 1 / (x * x);
  return std::log(x) - 0.5 / x - square * Polynomial(kSeries, square) - below;
}

// Cephes' lgam, bit for bit: readers of stored profiles compare a constant that it goes into.
double LogGamma(double x) {
  static constexpr double kB[] = {-8.53555664245765465627e5, -1.72173700820839662146e6, -1.16237097492762307383e6,
                                  -3.31612992738871184744e5, -3.88016315134637840924e4, -1.37825152569120859100e3};
  static constexpr double kC[] = {-2.01889141433532773231e6, -2.53252307177582951285e6, -1.13933444367982507207e6, -2.20528590553854454839e5,
                                  -1.70642106651881159223e4, -3.51815701436523470549e2, 1};
  static constexpr double kA[] = {8.33333333333331927722e-2, -2.77777777730099687205e-3, 7.93650340457716943945e-4,
                                  -5.95061904284301438324e-4, 8.11614167470508450300e-4};
  static constexpr double kLarge[] = {0.0833333333333333333333, -2.7777777777777777777778e-3, 7.9365079365079365079365e-4};
  if (x < 13) {
    // By the recurrence to 2 <= u < 3.
    double product = 1, shift = 0, u = x;
    while (u >= 3) {
      shift -= 1;
      u = x + shift;
      product *= u;
    }
    while (u < 2) {
      product /= u;
      shift += 1;
      u = x + shift;
    }
    if (u == 2) return std::log(product);
    const double y = x + (shift - 2);
    return std::log(product) + y * Polynomial(kB, y) / Polynomial(kC, y);
  }
  const double sum = (x - 0.5) * std::log(x) - x + kHalfLogTwoPi;
  if (x > 1e8) return sum;
  const double square = 1 / (x * x);
  return sum + (x >= 1000 ? Polynomial(kLarge, square) : Polynomial(kA, square)) / x;
}

double GammaCdf(double a, double x) {
  if (!(x > 0)) return x != x ? x : 0;
  return x == kInfinity ? 1 : GammaLower(a, x);
}

double GammaQuantile(double a, double p) {
  if (!(p > 0)) return p == 0 ? 0 : std::nan("");
  if (!(p < 1)) return p == 1 ? kInfinity : std::nan("");
  // First guess: Wilson and Hilferty (1931), or the first term of the series where that is not near.
  const double root = 1 - 1 / (9 * a) + NormalQuantile(p) / (3 * std::sqrt(a));
  double x = root > 0.2 ? a * root * root * root : std::exp((std::log(p) + LogGamma(a + 1)) / a);
  if (x == 0) return 0;
  // Halley's method on the smaller of P and Q, within a bracket that only shrinks.
  const bool upper = p > 0.5;
  double low = 0, high = kInfinity;
  for (int i = 0; i < 200; ++i) {
    const double error = upper ? (1 - p) - GammaUpper(a, x) : GammaLower(a, x) - p;
    if (error == 0) break;
    (error > 0 ? high : low) = x;
    const double density = GammaWeight(a, x) * a / x;
    double step = error / density;
    const double bend = 1 - 0.5 * step * ((a - 1) / x - 1);
    if (bend > 0.5 && bend < 2) step /= bend;
    double next = x - step;
    if (!(next > low && next < high)) next = high == kInfinity ? 2 * x : 0.5 * (low + high);
    if (std::fabs(next - x) <= 2 * kEpsilon * x) break;
    x = next;
  }
  return x;
}

}  // namespace kvpages
