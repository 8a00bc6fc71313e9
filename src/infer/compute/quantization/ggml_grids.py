"""The grids of GGML's IQ types: tables of the patterns that groups of values may have.

A pattern has 16 bits: two bits for each of eight values, or four for each of four values, the first in the lowest bits.
The patterns of a grid ascend, so the text contains their differences, compressed. Source: ggml-common.h of llama.cpp.
"""

import base64
import zlib
from functools import cache

import numpy as np
from numpy.typing import NDArray

_DIFFERENCES = {
    "IQ1": """
        c-oCujc(&M3>IZ6c4}XLuysxoU(*5|+U*W|o!*)NJz$6K)~(nx?9InN(UP6)h9ZqEQ55-+{Kz=xU4?(%)h@UezZdw~xQ^G(@JUu$+k0}LyA?jQZg
        3HwmiURNgVw!!Z|8Tj^Q61Mx9ECZp_>E#m$%<RP7Wy5q0|Z9@{ynSd?VnVNc6ZH@eJsC#X7{B-kqaP@hk2AiP8`F-KkWAt7QAY)<(Sfkgf3`3Oha
        1qK*M20B@6(2gRm4>U)E-8?$uWeTk6itoUw0mb5>pbYL8O=B;2qC>DUL361Es?vyoE?#&{)&@=RYf}gELYY%i|tB5vueuMV`$8^L|&JG;!VCdIs=
        dYFt^O(q5o7o7NWY6~i%jQu9MyJZ+pDc=Qot>%GR<gXZ^8>EZ`x#1qg~*we@Qc}9-ZJ3=GsUYH0dv`#*P}g=v2FOB_DIub_YTqa?s^iPlw%RKy~I
        2x1eY=^rn@QAI<_QgtP*Nllw5Fx_k82DiX-n0v%MXhX_jt_sCr(J8_A+C_)OOIMJ|f$t;OGK<x`AWe(SV;TaLztGwsB^9IP-xJbC_uem`@}$lF`J
        x3d_D$E0~TIW>BGpkgnjmha3{vH2JFG%~Nr4dP|WuuAi#&f?!%K1&6OHQ;`;N*d6oirFi=8{ECX+WH>RI-h83HG{k&T${GWeR43XrO3QFzNai7vz
        }J24&<!Z{K#C}W>FI!PJ9SjIfBs@$_fLEU(e9-N{hKzD>}=fcD&|d;5=Dqeu&JPt*;A)@|saYhI`WZhOzM$c|!67;TUrsisnNs{G~J3`ki=wUoe$
        eK|V;VOH`AMzBoaMh|WA7k6M*t%k?B?WYdk-Gof+fJ_DEziCZZ6Q5YtVEEK5qcp}e7i96YmBMV1aw)Af9?ey+mV>I0v^X*aB{Dgg{x>v@~Q1mKab
        dW2}16d1PpJ`<WBl3jp5-UBgC-F$^kQ_}ce5jr}&bx0%eZ^JNWOsDPPyzWqaxVa735lghEUm7WW<S~aC63J7S@tFVT)9i?!x<BGj7g<^EU4YIw#K
        ^~n-jkB|9j2^>5z^4QRkPx02Eunt<R>uX_wuqoHr~IPwcZUTVX9uIjG7q;=RT{*eoFkJaKPm`7Y3^&7<cTPr|_~e|n8+!0&*bNYpMgk`41tjeU2g
        NF)~OHD`Us3R15tzNOU~42+z2KdHv3Yy;f;Px;=?JzY*aO>6z4J31eF%du!&=b4MWMzlRTE8c7Wo9liBnKIvTZAffB&~$@nEcI0Kf7$~^uFGeXQ=
        W}STV=ut%8!Bj>Jl;8&-!<7b1!v<{s0cC^W<}vw>rG#NFJM&N&e@#&e(CpfbEUeAt>uNMHedPyxKA&+KihRddpF+vVOKVzqS*sDxUbg`_6rW)R|~
        ~jZY;HiGI<YI&#DPVmjkC%rNjjyU<D_n=|~vYWh(tfvR|sF;nX8<ky;KN#ITbP8ewq7n%c6ry9y2s)QSxtDXxi#@Ts&fKk%4*xPR|sjp|8g3b+9;
        qg1`h_CTjCJ?*L^GkSHto^7+COd9fj^6)Z=>>O;Z%vASL#MyL!t9sD;QpE9LOBt1#e60`;LV~D*y~_yNa){j{v`H9hJ=!7?*GI0Go8{0eoE|hkGr
        q#kd}EZ{R?w{Q3U
    """,
    "IQ2_XXS": """
        c-l>o%_~G<6vlt=9q$<5%`|34k?SKV7I(u;lA4l4*+^L^!%A!<ikg~|KVnKTNhv9mg%S%=w)R%GQp&<c@!UIC>2}Y#=bYy}=Q-zsLqv~5t!$%wRB
        t-?j!`Gyt~f@9#UN)HV4Nf?%DNON89y5jaZ%yA0$h@XFz%yAd~vol!Belxg0Uf{Eu1+_kx}kR@NTPoox=47^VWjt9`#~67W<9yW2<VGGE*Fo;w@0
        &k*B1}K9`(ZU-bwbVsbc<y_Ww8aVbuP?P1Vtn+%&=nA_I>8^>tYyy_<FQj%A{mBtowsw5}}8Vb_Cqv!?WRCz5o%!{Lo2c}uKK3`0G7i5c!vCO+PI
        J(6bvz(c@^3&>n;@kTD{n}_wy^~aQqXr>2xO48({w`Um*wxMYdFI3X{R@{06U?xsy33JqOq2Pv{%zY?Qg)R`U96jKnv54Y<TX0O5PO=RadI_R`~s
        sbK5z
    """,
    "IQ2_XS": """
        c-noE!An$O6vcnv8=k#nm>L<!j4_`kgAv8U!9{H(6H+7>fsG^TI4-n^Bnq5}S>(QT5JHG8T86tI2v@CI)SuwmUCVIc`M!BmGsBDw@6EmU-Fxo2=U
        (tg=;v|4y%YMcM+V#ci+XZRwy!UhwwyXjb5@eTAtiay5*=}GpPTejHRpHolrz#5Bh4_o&dPFC->0dWW;V7<E@m=LD6FFMBJL?tRU}|r(TaaQi==V
        }y0VDKDEcgB8wqvav}akxGQ!-AD~{w%^3_<+<F>pB-YBcW2}>0H)+ri&LZ`a50*2UQlr_y&awvmhc%-?~Jm87EcPyJg2wC+hNSz<be9aX$=ux!V-
        +khC?K;owi$R$>{{h?EwBE;mZJs;JPQT2i6uK+#&@@mkk>aCR7u*bcocf(ED2kP{SL5-W86g!-;|4-?3&keTgaIF<z#Yma!!4oDsWPvc`=;hM7^N
        8Fx^7|2<e6pLWclm3lv(wj@{MB_EUW%b7Z3@{;uZhxJFT9d)qh?7HQA+js|j%pxuH9o(cWJ1i1)_sZPL}}wY!{IQ+|p*N-?*rZlR{VPV+~KRE^J+
        Q{gvTs`<iYZ;?;@WS)KL)Z_Ns%MORic_@8tY?R0D1{e8d3cS>GHfohw;jQcgJzLWC49CYy3j
    """,
    "IQ2_S": """
        c-oy+&ubGw6#k}V8Z!(H9=dj8Nc>SnDurM{s)z><Lhx3Qv{G30AQf%NMGB>t2>u7sTh9e=dh;OUPxH&nY%;UEv&OQ_%+A|4-@Ny|9}6sDna>g$W?
        trMC23*bbo(3LUPJO3R%mt#ryA6=nA+?$$3cLkh&<PQXpj|Fk%@Xcik5eR8=KxezNU<L*a>WUSFk9T-!}6|lzo(*7e1;)3yEP$&*Z%Tv4s(?^L-U
        7)VPlU4rP_+?Gm$oyi~2%@yPmqA8|<Ijdr$A*R80}|HouZ!*N<-xsOc@MHtgw>Eu}jR*ENhZx9mvkg-_Vc(iDZ;^W6iyL)tCpTfF{P@B6Qu3hYlV
        #Y1zSwf7l^D)Jx@OgfUTh5Yi_`(}sV1t+^YaxqyY}+-ppi3FijMPhA?DDMDCLaRk#Z~ick*rWIMxzQw`?!Y#VRJQhej|D|!6)}Nk#!YSUnf_~>6B
        iL#iFOHtRK%ZXd=qr75hh?Srgv&8F#TSZGQ;6(!Y61$&=;l6??IaSkfnQmz8>q?>G`u$!l!mkdk$gAzPax+s@J{bwcfRo@z$69Ct%gyN#LTXNk$)
        !aORR%px)gDsUGW*JsSJKX}Zu4_J|z^zGBpXwOj;F5OKZ@J7_<;U2$acu5{FL>}Fb^mah`b1{<nAMu*2iCw;()4mI?wkPeG*><EU;s7^U^(l75Z_
        &jme&G?mQX}D5!CTzHUl`O*2m
    """,
    "IQ3_XXS": """
        c-lpfKTE?<6va<M2?;TV5`s`_48=`C5O)#R;^6K_(vm?Z2NfNQbaK&Bvpa}%7xi-p{_g7^3Gdza&O7Jab0hhD39F-sJylox)bk~pg2%3A>Z@6@Q-
        _$Qr$7blz^OA0b+26*#`Yb)r&2$vHHPi0f_)pVycgAUktPl?>~q~a)v-pL3R30xT;nm+JNp3NOKp3FUc-MU%i7h<dB#hJ12<XYZi|#Tdrlsk?Tpp
        pKOuDw?uBP*YQ2Q387sKSIz>i(cHMGbO5Kp;S6ieR;oiq#22zo+(nFY`@j*Kz9m9%H1iI59tP{MfbEPXUcJAL{P3HziNu7ZlaXZx%rp?`e?s#*@E
        S+Ks;|ZrXG@D+_>5I<xZhs&mNvSz=eUK~BBblvV3u^yppbhU2zeqQ5
    """,
    "IQ3_S": """
        c-l>q&2G~`6ooGnC$-yntT-;Hp^h821<^|E5E48d1=<L@L!e5)uKbiOEV?fef_Gqv`U-sacv7m7Gk5OKIp^M)nB8CvELb5cu-4f#i&kO}bPlpBP6
        K<I^2W;Az>|@Y5pDS`?NENl^Xv`fINA!S#aeQ9zhgQ_1TEO6aGu#zi0+O0?d&DdZ9d13LhrC%31MyvPDfI{%5f#9`G1{3t4KX~O`vunt<Jx$s!D8
        ?;v+k-I?W|ZN@{9qn7pq-xg$kO6hzeYQ)<Q1&*bAZ%+7w|87ThkYN8GLyn2~mR~e+wdnwY4`tzoE12YOz)X#sMIKD{POxSDi*TiRdo~y?({jOM}-
        L%)J-@;!hw$JYo(TO;ws9cgcr2YZX_k4akQ!>8h)s@2DD$@*W??av{O=3qH4iu?%KWCavnR=UOkIdU&#1NKB)5z?Nu$`}Fwf4?-?L19)Y8QEbCz)
        PY#oFPG4E4S$A@$KysdL<#{T8{=j>TT4Te@Js17g7hj<IL<1dR*3%QS~}n@F^?JSLSrUxWQ3bzafKW8Tq33?uY?rmldi<?NY<)NB)N><8a2RhQ~y
        ZkPG$&EB&UI#{zu_6apnefumM_Rjv0+u2)i_R;mh9@;Nz{^qV`3#*}TXF5U6l+0k?b*CfEW<fuDoabQo|LQ&a4coch=SBVlcc4Ex
    """,
}


@cache
def grid(name: str) -> NDArray[np.uint16]:
    """Return the patterns of a grid."""
    differences = zlib.decompress(base64.b85decode("".join(_DIFFERENCES[name].split())))
    return np.cumsum(np.frombuffer(differences, "<u2"), dtype=np.uint16)


def pattern_words(name: str, width: int) -> NDArray[np.uint32]:
    """Return the patterns of a grid as words: one byte per code, codes 4 to 7 in the high nibbles."""
    patterns, bits = grid(name).astype(np.uint32), 16 // width
    words = np.zeros_like(patterns)
    for code in range(width):
        words |= (patterns >> bits * code & (1 << bits) - 1) << 8 * (code % 4) + 4 * (code // 4)
    return words


def _half_of_ue4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code == 0x7F:
        return 0.0
    return (mantissa if exponent == 0 else (8 + mantissa) * 2 ** (exponent - 1)) / 1024


# Half of the value of each unsigned E4M3 number of NVFP4, as the bits of an f16. The top bit is ignored, except in
# 0xFF.
UE4M3_HALVES = np.array([_half_of_ue4m3(code) for code in range(256)], np.float16).view(np.uint16)
# Kinds of a grid, by the second form of its patterns: shifted with the whole group or separately, or with signs.
SHIFT_OF_GROUP, SHIFT_OF_8, EVEN_SIGNS, FREE_SIGNS = range(4)
